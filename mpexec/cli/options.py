"""Options that several commands share, what their values may be, and what they mean."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

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


def model_options(command: Any) -> Any:
    """Which model to run, over how many processes, and how they start: `--model`, `--tp`, `--start-method`, `-v`."""
    return _add(
        command,
        click.option(
            "--model",
            metavar="PATH",
            help="Local folder with a Hugging Face causal language model, or a bundled one's name. Default: the "
            "bundled one.",
        ),
        click.option(
            "--tp",
            type=click.IntRange(min=1),
            default=2,
            show_default=True,
            help="Processes that share every layer of the model.",
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


def find_model(given: str | None) -> str | None:
    """A folder as given, the folder of a bundled model by name, or None for the default one."""
    if given is None or Path(given).exists():
        return given
    from mpexec.models import bundled_models

    by_name = {model.name: str(model.path) for model in bundled_models()}
    return by_name.get(given, given)
