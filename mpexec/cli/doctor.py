"""`mpexec doctor`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from itertools import chain

import click

from mpexec.cli import checks, machine
from mpexec.cli.checks import Finding
from mpexec.cli.progress import progress
from mpexec.cli.report import ToldError, print_json_line

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_PACKAGES = tuple(chain.from_iterable(checks.EXTRAS.values()))


@click.command(
    "doctor",
    epilog="""\b
Examples:
  mpexec doctor
  mpexec doctor --json | jq 'select(.status != "ok")'
\b
Exit codes: 0 no line says fail, 1 one does.""",
)
@click.option("--json", "as_json", is_flag=True, help="Print one object a line: name, status, text, remedy.")
def command(as_json: bool) -> None:
    """Look at this machine, and say what mpexec will find wanting.

    Looks at the kernel's calls, cores, memory, limits, GPUs and versions, and starts two ranks that call each other.
    Each line says ok, warn (slower, or something is missing) or fail (mpexec does not work here), with the remedy.
    """
    worst = "ok"
    for finding in _findings():
        print_json_line(finding.as_dict()) if as_json else click.echo(_line(finding))
        if finding.status == "fail":
            worst = "fail"
    if worst == "fail":
        raise ToldError(1)


def _findings() -> Iterator[Finding]:
    """All findings, each as soon as it is there."""
    yield from checks.check_kernel(machine.kernel_release(), machine.PROBES)
    yield _looked_at("cores", lambda: checks.check_cores(machine.read_cores()))
    yield _looked_at("memory", lambda: checks.check_memory(machine.read_memory()))
    yield _looked_at("descriptors", lambda: checks.check_descriptors(*machine.read_limits()))
    with progress("importing torch"):
        torch = machine.read_torch()
    yield from checks.check_versions(platform.python_version(), torch, machine.read_versions(_PACKAGES))
    yield checks.check_gpus(torch, machine.has_gpu_driver())
    with progress("starting two ranks"):
        from mpexec.cli.round_trip import measure_round_trip

        facts = measure_round_trip()
    yield checks.check_round_trip(facts)


def _looked_at(name: str, look: Callable[[], Finding]) -> Finding:
    """The finding; a machine that does not tell its facts is a warning, not the end of the report."""
    try:
        return look()
    except (OSError, ValueError, KeyError) as unknown:
        return Finding(name, "warn", f"cannot be read: {unknown}", "is /proc mounted?")


def _line(finding: Finding) -> str:
    status = click.style(f"{finding.status:<4}", fg=_COLOURS[finding.status], bold=finding.status != "ok")
    remedy = f"\n      → {finding.remedy}" if finding.remedy else ""
    return f"{status}  {finding.name:<18}  {finding.text}{remedy}"
