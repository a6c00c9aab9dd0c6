"""The command line of the benchmarks."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import click

from tests.bench import death, engine, idle, imports, launcher, payload, ray_executor, rpc, startup, zmq_engine
from tests.bench.fresh import BenchError
from tests.bench.settings import Part, Settings
from tests.bench.stats import Row, table

PARTS: dict[str, tuple[Part, str]] = {
    "imports": (imports.run, "import mpexec"),
    "rpc": (rpc.run, "round trips with a tiny argument, against N multiprocessing Pipes (message pickled once)"),
    "payload": (payload.run, "16 and 256 MiB, 2 ranks, against np.copyto (ratio = copy time / call time)"),
    "death": (death.run, "SIGKILL to the error in the caller, against a pidfd observer"),
    "startup": (startup.run, "start to first reply, torch and gloo in the ranks"),
    "idle": (idle.run, "CPU of driver and 2 ranks while nobody calls"),
    "engine": (
        engine.run,
        "tokens a second, against a bare loop over the same agent and against transformers' generate",
    ),
    "zmq": (zmq_engine.run, "the engine in a process of its own, against in process; its RPC, against bare pyzmq"),
    "ray": (ray_executor.run, "round trips against bare Ray actors; the engine on RayExecutor, against on MPExecutor"),
    "run": (
        launcher.run,
        "`mpexec run` against torchrun: to the first line of a script, and from a failure to the exit",
    ),
}
# Run only when named: all others together are to take less than five minutes.
OPTIONAL = {"engine", "zmq", "ray", "run"}
FAILED, MISSED = 1, 3


_HELP = f"""Run the benchmarks PARTS and print each figure beside its bar.

Without PARTS, all but these run: {", ".join(sorted(OPTIONAL))}.

Exit code 0 unless a benchmark itself could not be carried out. Run it on a machine that does nothing else.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=_HELP)
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every figure to FILE.",
    metavar="FILE",
)
@click.option("--repeats", type=click.IntRange(1), default=None, help="Interleaved repeats: 5, 2 with --quick.")
@click.option("--quick", is_flag=True, help="A small run that shows that everything works; its figures mean little.")
@click.option("--strict", is_flag=True, help=f"Exit with {MISSED} if a bar is missed.")
def main(parts: tuple[str, ...], json_file: Path | None, repeats: int | None, quick: bool, strict: bool) -> None:
    """The command, as its help describes it."""
    settings = Settings(repeats or (2 if quick else 5), quick, lambda text: click.echo(f"... {text}", err=True))
    facts = _facts(settings)
    click.echo(facts["text"])
    results: dict[str, list[Row]] = {}
    failures: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name in chosen(parts):
        run, title = PARTS[name]
        began = time.monotonic()
        try:
            results[name] = run(settings)
        except BenchError as error:
            failures[name] = str(error)
        seconds[name] = time.monotonic() - began
        text = table(results[name]) if name in results else f"FAILED: {failures[name]}"
        click.echo(f"\n{name}: {title} ({seconds[name]:.0f} s)\n{text}")
    missed = [f"{name}: {row.name.strip()}" for name, rows in results.items() for row in rows if row.verdict == "MISS"]
    _print_summary(results, missed, failures, sum(seconds.values()))
    if json_file is not None:
        parts_as_data = {name: [row.as_dict() for row in rows] for name, rows in results.items()}
        content = {"facts": facts, "parts": parts_as_data, "failures": failures, "missed": missed, "seconds": seconds}
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(FAILED if failures else MISSED if missed and strict else 0)


def chosen(parts: tuple[str, ...]) -> list[str]:
    """The parts to run: those that are named, each once, or all that are not optional."""
    return list(dict.fromkeys(parts)) or [name for name in PARTS if name not in OPTIONAL]


def _print_summary(results: dict[str, list[Row]], missed: list[str], failures: dict[str, str], seconds: float) -> None:
    kept = sum(row.verdict == "ok" for rows in results.values() for row in rows)
    click.echo(f"\n{kept} bars kept, {len(missed)} missed, {len(failures)} parts failed, {seconds:.0f} s")
    for name in missed:
        click.echo(f"MISS  {name}")


def _facts(settings: Settings) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return {
        "cores": cores,
        "load": load,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "repeats": settings.repeats,
        "quick": settings.quick,
        "text": f"{cores} cores, load {load:.2f} before the start, Linux {platform.release()} {platform.machine()}, "
        f"Python {platform.python_version()}, {settings.repeats} interleaved repeats; medians over the repeats"
        + (", QUICK" if settings.quick else ""),
    }


if __name__ == "__main__":
    main()
