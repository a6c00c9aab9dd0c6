"""`mpexec run`: torchrun's options for `mpexec.launcher`."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import click

from mpexec.cli.child import run_python
from mpexec.cli.report import complain
from mpexec.cli.values import Number, whole_number
from mpexec.errors import ConfigError
from mpexec.launcher import Job, Std, launch_job
from mpexec.launcher.job import DEFAULT_GRACE_S, DEFAULT_SIGNALS

_MOST_RANKS = 1_000_000  # on a machine, which has fewer process ids to give than four times as many
_COUNTS = {
    "gpu": "torch.cuda.device_count()",
    "xpu": "torch.xpu.device_count() if torch.xpu.is_available() else 0",
    "auto": "torch.accelerator.device_count() if torch.accelerator.is_available() else len(os.sched_getaffinity(0))",
}
_NO_EFFECT = {
    "start_method": "a rank is always a new process with your command, as under torchrun",
    "monitor_interval": "the kernel tells when a rank ends, so nothing is looked at in intervals",
}
_REFUSED = {
    "rdzv_conf": "there is no rendezvous service to configure: the ranks meet at MASTER_ADDR and MASTER_PORT",
    "local_addr": "this machine needs no address: the ranks meet at --master-addr",
    "event_log_handler": "no events are recorded; what happened is in the last message and in the exit code",
    "logs_specs": "there are no log plug-ins; use --log-dir, --redirects and --tee",
    "duplicate_stdout_filters": "output is not filtered; use --tee, and grep on the files",
    "duplicate_stderr_filters": "output is not filtered; use --tee, and grep on the files",
    "numa_binding": "ranks are not bound to processors; start them through numactl with --no-python",
    "virtual_local_rank": "LOCAL_RANK is the local rank; choose devices by it in the script",
    "run_path": "a script is always run as `python SCRIPT`; leave the option out",
}


def torchrun_option(name: str, *more: str, **settings: Any) -> Callable[[Any], Any]:
    """An option by both of torchrun's spellings, with dashes and with underscores."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
    return click.option(*more, *spellings, name.replace("-", "_"), **settings)


def hidden_options(function: Any) -> Any:
    """Torchrun's options that have no meaning here; they are told of when they are given."""
    for name in ("virtual-local-rank", "run-path"):
        function = torchrun_option(name, is_flag=True, default=None, hidden=True)(function)
    flags = ("virtual_local_rank", "run_path")
    for name in (*_REFUSED, *_NO_EFFECT):
        if name not in flags:
            function = torchrun_option(name.replace("_", "-"), default=None, hidden=True)(function)
    return function


@click.command(
    "run",
    context_settings={"allow_interspersed_args": False, "auto_envvar_prefix": "PET"},
    epilog="""\b
Examples:
  mpexec run --nproc-per-node 4 train.py --epochs 3
  mpexec run --nproc-per-node gpu --max-restarts 2 -m package.train
  mpexec run --nproc-per-node 2 --tee 3 --log-dir logs --no-python ./start.sh
\b
Exit codes: 0 all ranks exited with 0; that of the rank that failed first, 128 + n if signal n ended it; 128 + n after
signal n to this command; 2 bad input (nothing was started); 141 nobody reads the output any more. All options can be
set by variables too, as for torchrun: PET_NPROC_PER_NODE=4. Unlike torchrun's, option names cannot be shortened.""",
)
@torchrun_option("nproc-per-node", default="1", metavar="N|cpu|gpu|xpu|auto", help="Ranks on this machine. Default: 1.")
@torchrun_option("nnodes", default="1", metavar="N", help="Machines; the same command runs on each. Default: 1.")
@torchrun_option("node-rank", type=int, default=0, help="Which machine this is, from 0. Default: 0.")
@torchrun_option("master-addr", default="127.0.0.1", help="Address of machine 0. Default: 127.0.0.1.")
@torchrun_option(
    "master-port",
    type=click.IntRange(1, 65535),
    help="Port on machine 0 where the ranks meet. Default: any that is free; 29500 with several machines.",
)
@torchrun_option("standalone", is_flag=True, help="One machine, any free port. This is so anyway, unless you say more.")
@torchrun_option("rdzv-backend", default="static", help="'static'; on one machine 'c10d' too, which changes nothing.")
@torchrun_option("rdzv-endpoint", default="", metavar="HOST:PORT", help="Another way to give address and port.")
@torchrun_option("rdzv-id", default="none", help="Name of the run, in TORCHELASTIC_RUN_ID and in the log folder.")
@torchrun_option("role", default="default", help="ROLE_NAME of the ranks. Default: default.")
@torchrun_option(
    "max-restarts", type=click.IntRange(min=0), default=0, help="Starts of the whole group after a failure. Default: 0."
)
@torchrun_option("module", "-m", is_flag=True, help="SCRIPT is a module, run as `python -m SCRIPT`.")
@torchrun_option("no-python", is_flag=True, help="SCRIPT is a program, run without python.")
@torchrun_option("log-dir", metavar="FOLDER", help="Where --redirects and --tee write: FOLDER/RUN/attempt_N/RANK/….")
@torchrun_option(
    "redirects",
    "-r",
    default="0",
    metavar="N|RANK:N,…",
    help="Streams that go to a file only: 1 stdout, 2 stderr, 3 both, for all ranks or by local rank.",
)
@torchrun_option("tee", "-t", default="0", metavar="N|RANK:N,…", help="As --redirects, and to the console as well.")
@torchrun_option("local-ranks-filter", metavar="RANK,…", help="Local ranks whose output is shown. Default: all.")
@torchrun_option(
    "shutdown-timeout",
    type=Number(),
    default=DEFAULT_GRACE_S,
    envvar=["PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
    show_envvar=False,
    help=f"Seconds between the signal that stops a rank and SIGKILL. Default: {DEFAULT_GRACE_S:g}.",
)
@torchrun_option(
    "signals-to-handle",
    default=",".join(number.name for number in DEFAULT_SIGNALS),
    metavar="NAME,…",
    help="Signals that are passed on to the ranks and end the job; a second one kills. Default: "
    f"{', '.join(number.name for number in DEFAULT_SIGNALS)}.",
)
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable for all ranks; may be given many times.")
@hidden_options
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(**options: Any) -> int:
    """Run N copies of a Python script, with torchrun's options and variables.

    The first rank that fails ends all others; what it said is printed last. Nothing outlives this command.
    """
    _answer_for_others(options)
    code = launch_job(_job(**options))
    gc.freeze()  # the program ends here: ten milliseconds sooner without a last garbage collection
    return code


def _answer_for_others(options: dict[str, Any]) -> None:
    """Take out of `options` what has no meaning here, and say so."""
    for name, reason in _REFUSED.items():
        if options.pop(name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is not supported: {reason}")
    for name, reason in _NO_EFFECT.items():
        if options.pop(name) is not None:
            complain(f"--{name.replace('_', '-')} has no effect: {reason}")


def _job(
    *,
    nproc_per_node: str,
    nnodes: str,
    standalone: bool,
    rdzv_id: str,
    redirects: str,
    tee: str,
    local_ranks_filter: str | None,
    shutdown_timeout: float,
    signals_to_handle: str,
    env: tuple[str, ...],
    log_dir: str | None,
    node_rank: int,
    role: str,
    max_restarts: int,
    **options: Any,
) -> Job:
    command = _command(options["script"], options["args"], module=options["module"], no_python=options["no_python"])
    machines = _machines(nnodes)
    if standalone and machines > 1:
        raise ConfigError("--standalone means one machine; leave it out, or --nnodes")
    nproc = _ranks_here(nproc_per_node)
    address, port = _meeting_point(
        machines, standalone=standalone, **_only(options, "master_addr", "master_port", "rdzv")
    )
    return Job(
        command,
        is_python=not options["no_python"],
        nproc=nproc,
        nnodes=machines,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
        run_id=str(uuid.uuid4()) if standalone else rdzv_id,
        role=role,
        env=dict(_entry(text) for text in env),
        redirects=_streams("--redirects", redirects, nproc),
        tee=_streams("--tee", tee, nproc),
        shown=_local_ranks(local_ranks_filter),
        log_dir=log_dir,
        line_prefix=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${local_rank}]:"),
        max_restarts=max_restarts,
        grace=shutdown_timeout,
        signals=tuple(_signal(name) for name in signals_to_handle.split(",")),
    )


def _only(options: Mapping[str, Any], *starts: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith(starts)}


def _command(script: str, args: tuple[str, ...], *, module: bool, no_python: bool) -> tuple[str, ...]:
    if no_python:
        if module:
            raise ConfigError("-m needs python: leave out --no-python")
        if shutil.which(script) is None:
            raise ConfigError(f"{script}: there is no such program that may be run")
        return (script, *args)
    if not module and not os.path.exists(script):
        raise ConfigError(f"{script}: there is no such script")
    return (os.environ.get("PYTHON_EXEC", sys.executable), "-u", *(["-m"] if module else []), script, *args)


def _machines(nnodes: str) -> int:
    if not (found := re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", nnodes)):
        raise ConfigError(f"--nnodes is a number, not {nnodes!r}")
    least, most = int(found[1]), int(found[2] or found[1])
    if least != most:
        raise ConfigError(f"--nnodes {nnodes}: the number of machines cannot change during a job; give one number")
    return least


def _ranks_here(nproc_per_node: str) -> int:
    if number := whole_number(nproc_per_node, most=_MOST_RANKS):
        return number
    if nproc_per_node == "cpu":
        return len(os.sched_getaffinity(0))
    if nproc_per_node not in _COUNTS:
        raise ConfigError(
            f"--nproc-per-node is a number from 1 to {_MOST_RANKS}, cpu, gpu, xpu or auto, not {nproc_per_node!r}"
        )
    # in a process of its own: torch takes seconds to import, and whoever asks a GPU holds memory of it
    code = f"import os, torch; print({_COUNTS[nproc_per_node]})"
    counted = run_python(code, stdout=subprocess.PIPE)
    if counted.returncode or not counted.stdout.strip().isdecimal():
        raise ConfigError(f"--nproc-per-node {nproc_per_node}: torch could not count the devices")
    if not (count := int(counted.stdout)):
        raise ConfigError(f"--nproc-per-node {nproc_per_node}: this machine has none that torch can use")
    return count


def _meeting_point(
    machines: int, *, standalone: bool, master_addr: str, master_port: int | None, rdzv_backend: str, rdzv_endpoint: str
) -> tuple[str, int | None]:
    """Address and port where the ranks meet; a port of None is chosen by the launcher."""
    if rdzv_backend not in ("static", "c10d"):
        raise ConfigError(f"--rdzv-backend {rdzv_backend} is not supported: use static, with --master-addr")
    if standalone:
        return "127.0.0.1", None
    if rdzv_backend == "c10d":
        if machines > 1:
            raise ConfigError(
                "--rdzv-backend c10d is for one machine here; use --node-rank, --master-addr, --master-port"
            )
        return "127.0.0.1", None
    if rdzv_endpoint:
        host, _, port = rdzv_endpoint.rpartition(":")
        number = whole_number(port, most=65535)
        if not host or number is None:
            raise ConfigError(f"--rdzv-endpoint is HOST:PORT, not {rdzv_endpoint!r}")
        master_addr, master_port = host, number or None
    return master_addr.removeprefix("[").removesuffix("]"), master_port


def _streams(option: str, text: str, nproc: int) -> dict[int, Std]:
    """Torchrun's `3`, or `0:1,1:2`."""
    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(nproc), Std(int(text)))
    if re.fullmatch(r"\d{1,9}:[0-3](,\d{1,9}:[0-3])*", text):
        pairs = (entry.split(":") for entry in text.split(","))
        return {int(rank): Std(int(std)) for rank, std in pairs}
    raise ConfigError(f"{option} is 0, 1, 2 or 3, or RANK:N,RANK:N, not {text!r}")


def _local_ranks(text: str | None) -> frozenset[int] | None:
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise ConfigError(f"--local-ranks-filter is RANK,RANK,…, not {text!r}")
    return frozenset(map(int, text.split(",")))


def _signal(name: str) -> signal.Signals:
    try:
        number = signal.Signals[name.strip()]
    except KeyError:
        raise ConfigError(f"--signals-to-handle: there is no signal {name!r}") from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"--signals-to-handle: nobody can handle {name}")
    return number


def _entry(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--env is NAME=VALUE, not {text!r}")
    return name, value
