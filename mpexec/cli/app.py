"""The command group, and how every command ends: one message, one exit code."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module

import click

from mpexec import __version__
from mpexec.cli.interrupt import Interrupted
from mpexec.cli.report import ReaderGoneError, ToldError, complain, describe_failure
from mpexec.errors import ConfigError

_COMMANDS = {
    "bench": "Measure a model on this machine: latencies and tokens a second for several numbers of streams.",
    "completion": "Print the completion script of a shell.",
    "doctor": "Look at this machine, and say what mpexec will find wanting.",
    "generate": "Continue prompts with a language model that is split over several processes.",
    "models": "List the language models that come with the package.",
    "ps": "List the executors of this user that offer themselves for inspection.",
    "run": "Run N copies of a script, as torchrun does; the first one that fails ends all.",
    "serve": "Serve a language model over HTTP, with OpenAI's API.",
    "stack": "Print what a driver and its ranks are doing right now: their Python stacks.",
}
_COMPLETE = "_MPEXEC_COMPLETE"  # set by the script of `mpexec completion` when a shell wants words
_EXIT_READER_GONE = 141  # 128 + SIGPIPE, as a program that does not ignore the signal


class LazyGroup(click.Group):
    """Imports a command's module when the command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, without importing anything."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command from the module of its name."""
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"mpexec.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table above."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  mpexec generate 'In the beginning'
  mpexec generate --json --prompts prompts.txt > answers.jsonl
  mpexec run --nproc-per-node 2 train.py --epochs 3
  mpexec generate --help""",
)
@click.version_option(__version__, prog_name="mpexec", message="%(prog)s %(version)s")
def group() -> None:
    """One PyTorch model, split over several processes, driven from one program."""


def run(args: list[str] | None) -> int:
    """Run the command line and return its exit code; what goes wrong becomes one message on stderr."""
    _use_no_loggers()
    _write_what_can_be_written()
    try:
        code = group.main(args, prog_name="mpexec", standalone_mode=False)
        _flush_stdout()
    except click.exceptions.NoArgsIsHelpError as no_command:
        click.echo(no_command.format_message(), err=True)
        return 2
    except click.ClickException as bad:
        complain(" ".join(bad.format_message().split()))  # on one line, a list of choices too
        return 2
    except ConfigError as bad:
        complain(str(bad))
        return 2
    except (Interrupted, ToldError) as ended:
        return ended.exit_code
    except SystemExit as ended:  # click exits when it has completed words, and where its own output has no reader
        return _leave_stdout() if _COMPLETE not in os.environ else _as_code(ended)
    except (ReaderGoneError, BrokenPipeError):
        return _leave_stdout()
    except Exception as failure:
        complain(describe_failure(failure))
        return 1
    return code if isinstance(code, int) else 0


def _as_code(ended: SystemExit) -> int:
    return ended.code if isinstance(ended.code, int) else 1


def _use_no_loggers() -> None:
    """What the library logs is in the error as well; printing both would tell the user twice."""
    import logging

    logging.getLogger("mpexec").addHandler(logging.NullHandler())


def _write_what_can_be_written() -> None:
    """A character that stdout's encoding lacks becomes a question mark; on stderr Python sees to that by itself."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # else it is not this process's own
        sys.stdout.reconfigure(errors="replace")


def _flush_stdout() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _leave_stdout() -> int:
    """Point stdout away, so that the interpreter's last flush does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return _EXIT_READER_GONE
