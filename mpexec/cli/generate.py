"""`mpexec generate`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mpexec.cli.interrupt import run_interruptibly
from mpexec.cli.prompts import read_prompts
from mpexec.config import START_METHODS

EXECUTORS = ("auto", "mp", "ray")


class ClusterAddress(click.ParamType[str]):
    """Where a Ray cluster is: "auto", "local", or host and port."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address, or a usage error that names the value."""
        text = str(value)
        if text in ("auto", "local"):
            return text
        if "://" in text:
            self.fail(
                f"{text!r} is of Ray Client: run this command on a node of the cluster, with HOST:PORT.", param, ctx
            )
        host, _, port = text.rpartition(":")
        if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
            self.fail(f"{text!r} is not HOST:PORT, 'auto' or 'local'; for example 10.0.0.1:6379.", param, ctx)
        return text


class NonNegative(click.ParamType[float]):
    """A finite number of at least 0."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error that names the value."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            self.fail(f"{value!r} is not a finite number of at least 0.", param, ctx)
        return number


@click.command(
    "generate",
    epilog="""\b
Examples:
  mpexec generate 'In the beginning'
  mpexec generate --tp 4 --temperature 0.8 --seed 7 'And it came to pass' 'Behold'
  printf 'In the beginning\\nAnd God said\\n' | mpexec generate --json
  mpexec generate --executor ray --ray-address 10.0.0.1:6379 --tp 2 'In the beginning'
\b
Exit codes: 0 done, 1 a rank or the engine failed, 2 bad input (no rank was started),
130 Ctrl-C, 141 the reader of stdout has gone, 143 SIGTERM.""",
)
@click.argument("prompts", nargs=-1, metavar="[PROMPT ...]")
@click.option(
    "--model",
    metavar="PATH",
    help="Local folder with a Hugging Face causal language model, or a bundled one's name. Default: the bundled one.",
)
@click.option(
    "--tp",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Processes that share every layer of the model.",
)
@click.option(
    "--executor",
    type=click.Choice(EXECUTORS),
    default="mp",
    show_default=True,
    help="Where they run: 'mp' on this machine; 'ray' in a Ray cluster, on one machine or several; 'auto' as 'ray' "
    "where RAY_ADDRESS is set, else as 'mp'.",
)
@click.option(
    "--ray-address",
    type=ClusterAddress(),
    metavar="HOST:PORT|auto|local",
    help="The Ray cluster, for --executor ray: where its head is, any that runs on this machine, or a new one for this "
    "run. Default: RAY_ADDRESS, or what 'ray start' has started here, else as 'local'.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Most tokens to generate for each prompt.",
)
@click.option(
    "--temperature",
    type=NonNegative(),
    default=0.0,
    show_default=True,
    help="0 takes the most likely token each time; higher is more varied.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**63 - 1),
    default=0,
    help="Of the random numbers: the same seed gives the same text. Default: 0.",
)
@click.option("--ignore-eos", is_flag=True, help="Go on after a token that ends the text.")
@click.option(
    "--stream/--no-stream",
    default=True,
    show_default=True,
    help="Print text as it comes, or each answer when it is whole.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one object a line: prompt, text, token_ids, prompt_token_ids, finish_reason.",
)
@click.option("--prompts", "file", metavar="FILE", help="Read the prompts from a file, one a line; '-' is stdin.")
@click.option(
    "--start-method",
    type=click.Choice(START_METHODS),
    default="spawn",
    show_default=True,
    help="How the processes are started, for --executor mp.",
)
@click.option(
    "--engine-process", is_flag=True, help="Run the engine in a process of its own, between this one and the ranks."
)
@click.option("-v", "--verbose", is_flag=True, help="Print the processes' ids, and log, to stderr.")
@click.pass_context
def command(
    context: click.Context, /, prompts: tuple[str, ...], model: str | None, file: str | None, **options: Any
) -> None:
    """Continue prompts with a language model that is split over several processes.

    Several prompts are computed together and printed in order, each under a header. Without PROMPT and --prompts, the
    prompts are read from stdin, one a line. The text goes to stdout, everything else to stderr.
    """
    check_executor(context)
    texts = read_prompts(prompts, file)
    from mpexec.cli.job import Job

    job = Job.prepare(texts, find_model(model), **options)
    run_interruptibly(job.run_async())


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


def find_model(given: str | None) -> str | None:
    """A folder as given, the folder of a bundled model by name, or None for the default one."""
    if given is None or Path(given).exists():
        return given
    from mpexec.models import bundled_models

    by_name = {model.name: str(model.path) for model in bundled_models()}
    return by_name.get(given, given)
