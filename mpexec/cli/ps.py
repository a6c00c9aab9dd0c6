"""`mpexec ps`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from mpexec.cli.drivers import Driver, find_drivers
from mpexec.cli.report import complain, print_json_line, printable


@click.command(
    "ps",
    epilog="""\b
Examples:
  MPEXEC_INSPECT=1 python train.py &
  mpexec ps
  mpexec ps --json | jq .pid
\b
Exit codes: 0 done, also where there is nothing to list.""",
)
@click.option("--json", "as_json", is_flag=True, help="Print one object a line for each executor, with all its facts.")
def command(as_json: bool) -> None:
    """List the executors of this user that offer themselves for inspection.

    A program's executors do so where MPEXEC_INSPECT=1 is set when they are made. For each: the driver's process, kind,
    state, ranks and calls in flight; beneath, each rank's process, and the method that it is in, for how long.
    """
    drivers = find_drivers()
    for driver in drivers:
        if as_json:
            _print_json(driver)
        else:
            _print(driver)
    if not drivers:
        complain("no executor offers itself: start its program with MPEXEC_INSPECT=1 in the environment")


def _print_json(driver: Driver) -> None:
    for executor in driver.executors or [{"error": driver.answer.get("error", "it has no executor any more")}]:
        facts = {"pid": driver.pid, "command": driver.command, **executor}
        print_json_line(facts)


def _print(driver: Driver) -> None:
    for line in _lines(driver):
        click.echo(printable(line))


def _lines(driver: Driver) -> Iterator[str]:
    if "error" in driver.answer:
        yield f"{driver.pid:>7}  {driver.answer['error']}  {driver.command}"
    for executor in driver.executors:
        yield f"{driver.pid:>7}  {_executor_words(executor)}  {driver.command}"
        yield from map(_rank_line, executor.get("ranks", []))


def _executor_words(executor: dict[str, Any]) -> str:
    if "error" in executor:
        return str(executor["error"])
    size, calls = executor["world_size"], executor["calls_in_flight"]
    cause = f" ({executor['root_cause']})" if executor.get("root_cause") else ""
    ranks = "1 rank " if size == 1 else f"{size} ranks"
    return f"{executor['kind']:<3}  {executor['state']:<8}{cause}  {ranks}  {calls} in flight"


def _rank_line(rank: dict[str, Any]) -> str:
    if rank.get("exit"):
        doing = str(rank["exit"])
    elif rank.get("method"):
        doing = f"{rank['method']} for {rank.get('seconds') or 0.0:.1f} s"
    else:
        doing = "idle"
    node = f" on {rank['node']}" if rank.get("node") else ""
    return f"{'':>9}rank {rank['rank']:<3} {rank.get('pid'):>7}{node}  {rank.get('state', ''):<8}  {doing}"
