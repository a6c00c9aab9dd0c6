"""`mpexec generate`."""

from __future__ import annotations

from typing import Any

import click

from mpexec.cli.interrupt import run_interruptibly
from mpexec.cli.options import (
    check_executor,
    executor_options,
    find_model,
    length_option,
    model_options,
    sampling_options,
    stall_option,
    take_sampling,
    without_effect,
)
from mpexec.cli.prompts import read_prompts
from mpexec.cli.report import complain


@click.command(
    "generate",
    epilog="""\b
Examples:
  mpexec generate 'In the beginning'
  mpexec generate --tp 4 --temperature 0.8 --top-p 0.9 --seed 7 'And it came to pass' 'Behold'
  mpexec generate --stop . --stop ';' 'In the beginning'
  printf 'In the beginning\\nAnd God said\\n' | mpexec generate --json
  mpexec generate --executor ray --ray-address 10.0.0.1:6379 --tp 2 'In the beginning'
\b
Exit codes: 0 done, 1 a rank or the engine failed, 2 bad input (no rank was started),
130 Ctrl-C, 141 the reader of stdout has gone, 143 SIGTERM.""",
)
@model_options
@executor_options
@click.argument("prompts", nargs=-1, metavar="[PROMPT ...]")
@sampling_options
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
    help="Print one object a line: prompt, text, token_ids, prompt_token_ids, finish_reason; and logprobs.",
)
@click.option(
    "--prompts",
    "file",
    type=click.Path(),
    metavar="FILE",
    help="Read the prompts from a file, one a line; '-' is stdin.",
)
@click.option(
    "--engine-process", is_flag=True, help="Run the engine in a process of its own, between this one and the ranks."
)
@length_option
@click.option(
    "--max-slots",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Prompts that are computed together; the others wait.",
)
@stall_option
@click.pass_context
def command(
    context: click.Context, /, prompts: tuple[str, ...], model: str | None, file: str | None, **options: Any
) -> None:
    """Continue prompts with a language model that is split over several processes.

    Several prompts are computed together and printed in order, each under a header. Without PROMPT and --prompts, the
    prompts are read from stdin, one a line. The text goes to stdout, everything else to stderr.
    """
    check_executor(context)
    if options["logprobs"] is not None and not options["as_json"]:
        raise click.UsageError(f"--logprobs {options['logprobs']} needs --json: text has no place for them.", context)
    texts = read_prompts(prompts, file)
    from mpexec.cli.job import Job

    job = Job.prepare(texts, find_model(model), sampling=take_sampling(options), **options)
    if idle := without_effect(context):
        complain(idle)
    run_interruptibly(job.run_async())
