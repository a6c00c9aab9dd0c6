"""`mpexec bench`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from mpexec.cli.interrupt import run_interruptibly
from mpexec.cli.options import check_executor, executor_options, find_model, length_option, model_options, stall_option
from mpexec.cli.values import whole_number
from mpexec.engine.files import is_writable
from mpexec.errors import ConfigError

_MOST_STREAMS = 1024


class Counts(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers, each once, ascending; or a usage error that names the value."""
        numbers = {whole_number(word.strip(), most=_MOST_STREAMS) or 0 for word in str(value).split(",")}
        if 0 in numbers:
            self.fail(f"{value!r} is no list of numbers from 1 to {_MOST_STREAMS}; for example 1,4,16.", param, ctx)
        return tuple(sorted(numbers))


@click.command(
    "bench",
    epilog="""\b
Examples:
  mpexec bench
  mpexec bench --model ~/models/Qwen3-0.6B --tp 4 --concurrency 1,4,16,64 --plot speed.png
  mpexec bench --json --prompt-tokens 512 --max-new-tokens 32 > figures.jsonl
\b
Exit codes: 0 done, 1 a rank or the engine failed, 2 bad input (no rank was started), 130 Ctrl-C; what was measured
until then is printed in any case.""",
)
@model_options
@executor_options
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Length of each prompt, of random tokens.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Tokens to generate for each prompt; none ends earlier.",
)
@click.option(
    "--concurrency",
    type=Counts(),
    default="1,4,8",
    show_default=True,
    help="Requests that run at the same time; each number is measured by itself.",
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    help="Requests for each number, and at least as many as that number.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**63 - 1),
    default=0,
    help="Of the random prompts: the same seed gives the same ones. Default: 0.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one object a line for each number, as soon as it is measured, with all latencies in milliseconds.",
)
@click.option("--plot", type=click.Path(), metavar="FILE.png", help="Draw speed and latencies into a picture, too.")
@length_option
@click.option(
    "--max-slots",
    type=click.IntRange(min=1),
    help="Requests that are computed together; the others wait. Default: as many as the largest of --concurrency.",
)
@stall_option
@click.pass_context
def command(context: click.Context, /, model: str | None, plot: str | None, **options: Any) -> None:
    """Measure a model on this machine: latencies and tokens a second for several numbers of streams.

    For each number of --concurrency as many requests run at a time, each a random prompt that is continued greedily.
    The table shows the median, the 90th and the 99th percentile of the time to the first token, of the time between
    tokens, and of the whole request.
    """
    check_executor(context)
    picture = check_picture(plot)
    from mpexec.cli.measure import Bench

    run_interruptibly(Bench.prepare(find_model(model), picture=picture, **options).run_async())


def check_picture(file: str | None) -> Path | None:
    """The file to draw to, if any, checked before minutes are spent on measuring.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    if file is None:
        return None
    path = Path(file)
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {file}: give a file name that ends in .png")
    if find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed, and --plot needs it: pip install 'mpexec[plot]'")
    if not is_writable(path):
        raise ConfigError(f"--plot {file} cannot be written: give a file in a folder that exists and is yours")
    return path
