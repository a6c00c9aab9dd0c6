"""Options that several commands share, and what they mean."""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

from mpexec.cli.values import ClusterAddress, Number, StopString
from mpexec.config import DEVICES, DTYPES, LEAST_SCALE, MAX_LOGPROBS, START_METHODS, is_temperature
from mpexec.errors import ConfigError

EXECUTORS = ("auto", "mp", "ray")


class Temperature(Number):
    """0, or a number that scores can be divided by."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error that names the value."""
        number = super().convert(value, param, ctx)
        if not is_temperature(number):
            self.fail(f"{value!r} is neither 0 nor at least {LEAST_SCALE:g}.", param, ctx)
        return number


def model_options(command: Any) -> Any:
    """Which model to run, over how many processes, on what, and how they start."""
    return _add(
        command,
        click.option(
            "--model",
            type=click.Path(),  # so that a shell completes it
            metavar="MODEL",
            help="A folder, a hub id (Qwen/Qwen3-0.6B), or a bundled name. Default: the bundled one.",
        ),
        click.option(
            "--tp",
            "--tensor-parallel-size",
            "tp",
            type=click.IntRange(min=1),
            default=2,
            show_default=True,
            help="Processes that share every layer of the model.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            default=DTYPES[0],
            show_default=True,
            help="Of weights and cache.",
        ),
        click.option(
            "--device",
            type=click.Choice(DEVICES),
            default=DEVICES[0],
            show_default=True,
            help="Where the model runs: 'auto' on GPUs where there is one for every process, else on the CPU.",
        ),
        click.option(
            "--start-method",
            type=click.Choice(START_METHODS),
            default="spawn",
            show_default=True,
            help="How the processes are started, where it is not Ray that starts them.",
        ),
        click.option("-v", "--verbose", is_flag=True, help="Log to stderr, the processes' ids included."),
    )


def length_option(command: Any) -> Any:
    """How long the texts of a command may be that knows its requests: `--max-length`."""
    return _add(
        command,
        click.option(
            "--max-length",
            type=click.IntRange(min=2),
            help="Most tokens of prompt and answer together. Default: what these requests need, at most what the "
            "model allows.",
        ),
    )


def stall_option(command: Any) -> Any:
    """For how long a command waits for a step of the model: `--stall-timeout`."""
    return _add(
        command,
        click.option(
            "--stall-timeout",
            type=Number(),
            default=120.0,
            show_default=True,
            help="Seconds without a step of the model after which the command ends with exit code 1; 0 for never.",
        ),
    )


def executor_options(command: Any) -> Any:
    """Where the processes run: `--executor` and `--ray-address`."""
    return _add(
        command,
        click.option(
            "--executor",
            type=click.Choice(EXECUTORS),
            default="mp",
            show_default=True,
            help="Where they run: 'mp' on this machine; 'ray' in a Ray cluster, on one machine or several; 'auto' as "
            "'ray' where RAY_ADDRESS is set, else as 'mp'.",
        ),
        click.option(
            "--ray-address",
            type=ClusterAddress(),
            metavar="HOST:PORT|auto|local",
            help="The Ray cluster, for --executor ray: where its head is, any that runs on this machine, or a new one "
            "for this run. Default: RAY_ADDRESS, or what 'ray start' has started here, else as 'local'.",
        ),
    )


_SAMPLING = (
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1, max=2**63 - 1),
        default=128,
        show_default=True,
        help="Most tokens to generate for each prompt.",
    ),
    click.option(
        "--temperature",
        type=Temperature(),
        default=0.0,
        show_default=True,
        help="0 takes the most likely token each time; higher is more varied.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0, max=2**63 - 1),
        default=0,
        help="Of the random numbers: the same seed gives the same text. Default: 0.",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(min=0, max=2**31 - 1),
        help="Draw from the K most likely tokens only; 0, the default, is all.",
    ),
    click.option(
        "--top-p",
        type=Number(above=0.0, most=1.0),
        help="Draw from the most likely tokens that together have this probability; 1, the default, is all.",
    ),
    click.option(
        "--min-p",
        type=Number(most=1.0),
        help="Draw only tokens at least this share as likely as the most likely one; 0, the default, is all.",
    ),
    click.option(
        "--repetition-penalty",
        type=Number(least=LEAST_SCALE),
        help="Above 1, tokens that prompt or answer have already become less likely. Default: 1.",
    ),
    click.option(
        "--stop",
        type=StopString(),
        multiple=True,
        help="End the text before this string; may be given several times. \\n is a line end.",
    ),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=click.IntRange(min=0, max=2**31 - 1),
        multiple=True,
        help="End the text at this token; may be given several times.",
    ),
    click.option(
        "--logprobs",
        type=click.IntRange(min=0, max=MAX_LOGPROBS),
        help="Have --json report each token's log probability, and as many of the most likely tokens.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after a token that ends the text."),
)
_SAMPLING_NAMES = (
    "max_new_tokens", "temperature", "seed", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "stop_token_ids",
    "logprobs", "ignore_eos",
)  # fmt: skip


def sampling_options(command: Any) -> Any:
    """How to continue each prompt; `take_sampling` takes their values."""
    return _add(command, *_SAMPLING)


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Take what `sampling_options` has added out of `options`, as fields of `SamplingParams`: only what was given."""
    taken = {name: options.pop(name) for name in _SAMPLING_NAMES}
    return {name: value for name, value in taken.items() if value is not None and value != ()}


def _add(command: Any, *options: Any) -> Any:
    for option in reversed(options):  # a decorator further down is listed later
        command = option(command)
    return command


def check_executor(context: click.Context) -> None:
    """Refuse options that belong to another executor than the one that was chosen.

    Raises:
        click.UsageError: Names the value and the remedy.
    """
    executor, address = context.params["executor"], context.params["ray_address"]
    if address is not None and executor != "ray":
        raise click.UsageError(f"--ray-address {address} needs --executor ray, but it is {executor!r}.", context)
    is_given = context.get_parameter_source("start_method") is not ParameterSource.DEFAULT
    if executor == "ray" and is_given:
        method = context.params["start_method"]
        raise click.UsageError(
            f"--start-method {method} is for --executor mp: with ray, Ray starts the processes; leave it out.",
            context,
        )


def without_effect(context: click.Context) -> str | None:
    """What to say of sampling options that were given and change nothing; None where there is no such."""
    names = ("top_k", "top_p", "min_p", "seed")
    given = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if context.params["temperature"] or not given:
        return None
    listed = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    return f"{listed} {'has' if len(given) == 1 else 'have'} no effect without --temperature above 0"


def find_model(given: str | None) -> str | None:
    """A folder as given, the folder of a bundled model by name, or None for the default one.

    Raises:
        ConfigError: A name of neither.
    """
    if given is None or not _is_missing(given):
        return given
    from mpexec.models import bundled_models

    by_name = {model.name: str(model.path) for model in bundled_models()}
    if given not in by_name and "/" not in given:  # else it may be a hub's, or a longer path says enough
        raise ConfigError(f"no model folder at {given}; bundled: {', '.join(by_name)} (`mpexec models`)")
    return by_name.get(given, given)


def _is_missing(path: str) -> bool:
    """True if nothing has that path; what else is wrong with one is told by whoever reads it."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        pass
    return False
