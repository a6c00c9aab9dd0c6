"""`mpexec stack`."""

from __future__ import annotations

from typing import Any

import click

from mpexec.cli.drivers import Driver, find_drivers
from mpexec.cli.report import ToldError, complain, print_json_line, printable
from mpexec.cli.values import ProcessId
from mpexec.errors import ConfigError


@click.command(
    "stack",
    epilog="""\b
Examples:
  mpexec ps
  mpexec stack 12345
\b
Exit codes: 0 done, 1 the driver does not answer, or one that may be it, 2 there is no such driver.""",
)
@click.argument("pid", type=ProcessId())
@click.option("--json", "as_json", is_flag=True, help="Print one object: pid, threads, and executors with their ranks.")
def command(pid: int, as_json: bool) -> None:
    """Print what a driver and its ranks are doing right now: their Python stacks.

    PID is the process of a driver that `mpexec ps` lists, or of one of its ranks. All goes on undisturbed. A rank's
    stacks come while it holds the interpreter in C code, too.
    """
    driver = _driver_of(pid)
    if "error" not in driver.answer:
        driver = next(iter(find_drivers("stacks", only=driver.pid)), driver)
    if "threads" not in driver.answer:
        complain(f"driver {driver.pid} {driver.answer.get('error', 'has ended')}")
        raise ToldError(1)
    if as_json:
        print_json_line(driver.answer)
    else:
        _print(driver)


def _driver_of(pid: int) -> Driver:
    """The driver that is this process, or that has it as a rank.

    Raises:
        ConfigError: There is none.
        ToldError: It may be one that does not answer; the message has been printed.
    """
    drivers = find_drivers()
    for driver in drivers:
        if driver.has_process(pid):
            return driver
    if silent := [f"driver {driver.pid} {driver.answer['error']}" for driver in drivers if "error" in driver.answer]:
        complain(f"process {pid} belongs to no driver that answers; {'; '.join(silent)}")
        raise ToldError(1)
    raise ConfigError(
        f"process {pid} has no executor that offers itself: `mpexec ps` lists those that do, and MPEXEC_INSPECT=1 in a "
        "program's environment makes it one"
    )


def _print(driver: Driver) -> None:
    _title(f"driver {driver.pid}  {driver.command}")
    for thread in driver.answer["threads"]:
        click.echo(f"thread {printable(thread['name'])}:\n{thread['stack']}")
    for executor in driver.executors:
        _print_ranks(executor)


def _print_ranks(executor: dict[str, Any]) -> None:
    if "error" in executor:
        _title(str(executor["error"]))
    for rank in executor.get("ranks", []):
        _title(f"rank {rank['rank']}  process {rank.get('pid')}  {rank.get('method') or 'idle'}")
        click.echo(executor["stacks"].get(str(rank["rank"]), "<no stack>"))


def _title(text: str) -> None:
    click.secho(f"== {printable(text)}", bold=True)
