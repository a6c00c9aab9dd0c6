"""`mpexec run` as people use it: torchrun's variables, the first failure, signals, output, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from patience import left_of
from patience import within as within_load

from mpexec.cli.run import command
from mpexec.launcher.port import reserve_port
from mpexec.processes.environment import apply_changes

RUN = [sys.executable, "-m", "mpexec", "run"]
Run = Callable[..., subprocess.CompletedProcess[str]]
within = partial(within_load, stretch=5.0)  # each rank is an interpreter that starts

pytestmark = [pytest.mark.spawn, pytest.mark.timeout(180)]

# What the scripts begin with. `until(path)` waits for an event that another process makes by creating a file.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
here = Path(__file__).parent

def until(name):
    while not (here / name).exists():
        time.sleep(0.005)

def mark(name, text=""):
    (here / f"{name}.new").write_text(str(text))
    (here / f"{name}.new").rename(here / name)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script with the prelude, and gives its path."""

    def write(body: str, name: str = "script.py") -> str:
        (tmp_path / name).write_text(PRELUDE + body)
        return str(tmp_path / name)

    return write


def run(*args: str, env: dict[str, str | None] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, with changes to the environment, of which None removes."""
    return subprocess.run(
        [*RUN, *args], env=apply_changes(os.environ, env or {}), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=150, check=False,
    )  # fmt: skip


@contextlib.contextmanager
def running(*args: str) -> Iterator[subprocess.Popen[str]]:
    """The command while it runs; whatever a test does, it is gone afterwards."""
    process = subprocess.Popen(
        [*RUN, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_files(process: subprocess.Popen[str], *paths: Path) -> None:
    """Wait until the scripts have made the files."""
    while not all(path.exists() for path in paths):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


# -- what a rank is ------------------------------------------------------------------------------------------------

VARIABLES = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
SHOW = f"print(json.dumps({{name: os.environ.get(name) for name in {VARIABLES}}}))"


def shown(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    """What the ranks printed, by rank."""
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda found: int(found["RANK"]))


def test_ranks_have_torchruns_variables_and_none_of_an_outer_job(script: Callable[..., str]) -> None:
    outer = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "10.255.255.1", "TORCHELASTIC_RUN_ID": "outer"}
    done = run("--nproc-per-node", "3", "--max-restarts", "2", script(SHOW), env={**outer, "OMP_NUM_THREADS": None})
    for rank, found in enumerate(shown(done)):
        assert found == {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "3"),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "2",
        }


def test_the_second_of_three_machines_has_the_ranks_after_the_first(script: Callable[..., str]) -> None:
    body = "print(json.dumps({n: os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')}))"
    options = ["--nnodes=3", "--node-rank=1", "--nproc_per_node=2", "--master-addr=node0", "--master_port=4567"]
    found = shown(run(*options, script(body)))
    assert [one["RANK"] for one in found] == ["2", "3"]
    assert {tuple(one.values())[1:] for one in found} == {("6", "node0", "4567")}


def test_a_script_is_main_and_gets_its_arguments_as_they_are(script: Callable[..., str]) -> None:
    body = "print(json.dumps([__name__, sys.argv[1:], sys.stdin.read(), sys.stdout.write_through]))"
    args = ["--tee", "3", "--", "-m", "x y", "--nproc-per-node=9"]
    done = subprocess.run(
        [*RUN, script(body), *args], input="words", capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == ["__main__", args, "words", True]


def test_a_module_a_program_and_the_other_ways_to_say_it(script: Callable[..., str], tmp_path: Path) -> None:
    script("print(os.environ['WORLD_SIZE'], os.environ['ROLE_NAME'], sys.argv[1])", name="module_of_mine.py")
    env = {"PET_NPROC_PER_NODE": "2", "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    assert run("-m", "--role", "trainer", "module_of_mine", "a", env=env).stdout == "2 trainer a\n" * 2
    done = run("--nproc-per-node", "2", "--env", "WORD=a=b", "--no-python", "sh", "-c", "echo $WORD $LOCAL_RANK")
    assert sorted(done.stdout.splitlines()) == ["a=b 0", "a=b 1"]
    command = [sys.executable, "-m", "mpexec.run", "--no-python", "echo", "here"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "here\n"


@pytest.mark.parametrize("how", [["found.py"], ["-m", "found"]])
def test_a_script_finds_what_python_alone_gives_it(tmp_path: Path, how: list[str]) -> None:
    body = "import os, sys; print(sorted(sys.modules), sys.path, sys.orig_argv, os.environ['PYTHONPATH'], dir())"
    (tmp_path / "found.py").write_text(body)
    settings = {"cwd": tmp_path, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), "/no/such/folder"))}
    plain = subprocess.run([sys.executable, "-u", *how, "a"], env=env, check=True, **settings)
    assert subprocess.run([*RUN, *how, "a"], env=env, check=True, **settings).stdout == plain.stdout


def test_the_launcher_does_without_torch(script: Callable[..., str]) -> None:
    code = (
        "import sys; from mpexec.cli import main\n"
        f"code = main(['run', {script('print(1)')!r}])\n"
        "print(sorted({'torch', 'numpy', 'asyncio', 'zmq', 'ray'} & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["1", "[] 0"]


def test_every_option_of_torchrun_is_accepted_or_refused_by_name_and_in_the_table() -> None:
    from torch.distributed.run import get_args_parser

    table = (Path(__file__).parents[2] / "docs" / "run.md").read_text()
    told = set(re.findall(r"`(--?[a-z-]+)", "".join(line for line in table.splitlines() if line.startswith("| `"))))
    ours = {spelling for option in command.params for spelling in option.opts}
    for action in get_args_parser()._actions:
        spellings = {*action.option_strings} - {"-h", "--help"}
        assert spellings <= ours
        assert {spelling for spelling in spellings if "_" not in spelling} <= told
    assert told - ours == set()


# -- bad input -----------------------------------------------------------------------------------------------------

BAD_INPUT = [
    (["/no/such/script.py"], "there is no such script"),
    (["--no-python", "no-such-program"], "no-such-program"),
    (["--no-python", "-m", "module"], "--no-python"),
    (["--nproc-per-node", "0", "x"], "'0'"),
    (["--nproc-per-node", "many", "x"], "'many'"),
    (["--nnodes", "1:2", "x"], "cannot change during a job"),
    (["--nnodes", "2", "--node-rank", "2", "x"], "--node-rank is 2"),
    (["--nnodes", "2", "--max-restarts", "1", "x"], "--max-restarts"),
    (["--nnodes", "2", "--standalone", "x"], "--standalone"),
    (["--nnodes", "2", "--rdzv-backend", "c10d", "x"], "--master-addr"),
    (["--rdzv-backend", "etcd", "x"], "etcd"),
    (["--rdzv-endpoint", "host", "x"], "HOST:PORT"),
    (["--redirects", "4", "x"], "--redirects"),
    (["--tee", "0:1,", "x"], "--tee"),
    (["--tee", "1:3", "x"], "--tee names local rank 1"),
    (["--local-ranks-filter", "a", "x"], "--local-ranks-filter"),
    (["--signals-to-handle", "SIGNONE", "x"], "SIGNONE"),
    (["--signals-to-handle", "SIGKILL", "x"], "SIGKILL"),
    (["--env", "NAME", "x"], "NAME=VALUE"),
    (["--log-dir", "/proc/none", "x"], "no folder for the logs"),
    (["--numa-binding", "node", "x"], "numactl"),
    (["--rdzv-conf", "a=b", "x"], "--rdzv-conf is not supported"),
    (["--run-path", "x"], "--run-path is not supported"),
    (["--no-such-option", "x"], "--no-such-option"),
    ([], "SCRIPT"),
]


@pytest.mark.parametrize("args, told", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], told: str) -> None:
    found = [sys.executable if word == "x" else word for word in args]
    done = run(*found)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("mpexec: ")
    assert told in line


def test_an_option_without_effect_is_told_of_and_the_job_runs(script: Callable[..., str]) -> None:
    done = run("--start-method", "forkserver", "--monitor-interval", "1", script("print('ran')"))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr.count("has no effect") == 2


# -- the first failure ---------------------------------------------------------------------------------------------

FAILURES = {
    "sys.exit(3)": (3, "exited with code 3"),
    "os.kill(os.getpid(), signal.SIGKILL)": (137, "killed by SIGKILL (not by mpexec"),
    "os.abort()": (134, "killed by SIGABRT"),
    "raise ValueError('too much')": (1, "exited with code 1"),
    "raise KeyboardInterrupt": (130, "killed by SIGINT (not by mpexec"),
    "import atexit; atexit.register(os._exit, 9); sys.exit(0)": (9, "exited with code 9"),
}


@pytest.mark.parametrize("end", FAILURES)
def test_the_first_failure_ends_the_others_and_is_told_last(
    script: Callable[..., str], tmp_path: Path, end: str
) -> None:
    code, told = FAILURES[end]
    body = f"""
def leave(*_):
    mark(f"handled{{rank}}")
    sys.exit(0)

signal.signal(signal.SIGTERM, leave)
mark(f"ready{{rank}}")
if rank == 1:
    until("ready0"), until("ready2")
    print("last words of rank 1", file=sys.stderr)
    {end}
while True:
    time.sleep(1)
"""
    done = run("--nproc-per-node", "3", script(body))
    assert done.returncode == code
    message = done.stderr[done.stderr.index("mpexec: rank 1 (local rank 1, pid ") :]
    assert told in message.splitlines()[0]
    assert "  last words of rank 1" in message.splitlines()
    if "ValueError" in end:
        assert "  ValueError: too much" in message.splitlines()
        assert "  Traceback (most recent call last):" in message.splitlines()
    assert (tmp_path / "handled0").exists()
    assert (tmp_path / "handled2").exists()


def test_a_rank_that_lost_its_peer_is_not_the_root_cause(script: Callable[..., str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "line")
    body = """
if rank == 0:
    end = open(here / "line", "w")
    until("ready")
    print("RuntimeError: Connection closed by peer [127.0.0.1]:1234", file=sys.stderr)
    os._exit(1)
end = os.open(here / "line", os.O_RDONLY)
mark("ready")
os.read(end, 1)
os._exit(7)
"""
    done = run("--nproc-per-node", "2", script(body))
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize("first, code", [("exit", 3), ("crash", 139)])
def test_the_table_tells_how_every_rank_ended_and_who_was_first(
    script: Callable[..., str], first: str, code: int
) -> None:
    body = f"""
def end(*_):
    sys.exit(3) if rank == 0 else os.kill(os.getpid(), signal.SIGSEGV)

if rank < 2:
    signal.signal(signal.SIGTERM, end)
mark(f"ready{{rank}}")
until("ready0"), until("ready1"), until("ready2")
if rank == {["exit", "crash"].index(first)}:
    end()
while True:
    time.sleep(1)
"""
    done = run("--nproc-per-node", "3", script(body))
    assert done.returncode == code
    ends = ["exited with code 3", "killed by SIGSEGV (not by mpexec)", "killed by SIGTERM (sent by mpexec)"]
    ends[0 if first == "exit" else 1] += "  <- root cause"
    table = done.stderr[done.stderr.index("mpexec: how the ranks ended:") :].splitlines()[1:4]
    assert [re.sub(r" \(pid \d+\)", "", line) for line in table] == [f"  rank {n} {how}" for n, how in enumerate(ends)]
    assert "restart" not in done.stderr


def test_the_error_file_of_torch_elastic_is_shown(script: Callable[..., str]) -> None:
    extra = {"py_callstack": "Traceback from the file\nKeyError: 'here'", "timestamp": "1"}
    content = {"message": {"message": "KeyError: 'here'", "extraInfo": extra}}
    done = run(script(f"Path(os.environ['TORCHELASTIC_ERROR_FILE']).write_text({json.dumps(content)!r}); sys.exit(5)"))
    assert done.returncode == 5
    assert "its error:\n  Traceback from the file\n  KeyError: 'here'" in done.stderr


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": {"extraInfo": 3}}', '{"message": "plain words"}'])
def test_an_error_file_may_hold_anything(script: Callable[..., str], content: str) -> None:
    done = run(script(f"Path(os.environ['TORCHELASTIC_ERROR_FILE']).write_text({content!r}); sys.exit(5)"))
    assert done.returncode == 5
    assert ("plain words" in done.stderr) == ("plain words" in content)


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(script: Callable[..., str]) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
mark(f"ready{rank}")
if rank == 0:
    until("ready1")
    sys.exit(4)
while True:
    time.sleep(1)
"""
    done = run("--nproc-per-node", "2", "--shutdown-timeout", "0.2", script(body))
    assert done.returncode == 4
    assert re.search(r"rank 1 \(pid \d+\) killed by SIGKILL \(sent by mpexec\)", done.stderr)


def test_a_restart_begins_the_whole_group_anew_at_another_port(script: Callable[..., str]) -> None:
    body = """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
mark(f"{attempt}-{rank}", os.environ["MASTER_PORT"])
if attempt == "2":
    print(rank)
    sys.exit(0)
until(f"{attempt}-0"), until(f"{attempt}-1")
sys.exit(3) if rank == 1 else time.sleep(60)
"""
    path = script(body)
    done = run("--nproc-per-node", "2", "--max-restarts", "2", path)
    assert done.returncode == 0
    assert sorted(done.stdout) == sorted("0\n1\n")
    assert [f"restart {n} of 2" in done.stderr for n in (1, 2, 3)] == [True, True, False]
    done = run("--nproc-per-node", "2", "--max-restarts", "1", path)
    assert done.returncode == 3
    assert done.stderr.count("<- root cause") == 2


# -- signals -------------------------------------------------------------------------------------------------------

COUNT_SIGNALS = """
counted = []

def count(number, _):
    counted.append(number)
    mark(f"counted{rank}", len(counted))

signal.signal(signal.SIGINT, count)
signal.signal(signal.SIGTERM, count)
mark(f"ready{rank}", os.getpid())
while not counted:
    time.sleep(0.005)
time.sleep(0.3)
sys.exit(0 if len(sys.argv) == 1 else time.sleep(60))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_once(script: Callable[..., str], tmp_path: Path, number: signal.Signals) -> None:
    with running("--nproc-per-node", "2", script(COUNT_SIGNALS)) as process:
        await_files(process, tmp_path / "ready0", tmp_path / "ready1")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert [(tmp_path / f"counted{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert "Traceback" not in stderr


def test_a_second_signal_kills(script: Callable[..., str], tmp_path: Path) -> None:
    with running("--nproc-per-node", "2", "--shutdown-timeout", "60", script(COUNT_SIGNALS), "stay") as process:
        await_files(process, tmp_path / "ready0", tmp_path / "ready1")
        process.send_signal(signal.SIGTERM)
        await_files(process, tmp_path / "counted0", tmp_path / "counted1")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert time.monotonic() - began < within(1.0)


def test_nothing_outlives_a_launcher_that_is_killed(script: Callable[..., str], tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
mark(f"pids{rank}", f"{os.getpid()} {child.pid}")
while True:
    pass
"""
    with running("--nproc-per-node", "2", script(body)) as process:
        files = [tmp_path / "pids0", tmp_path / "pids1"]
        await_files(process, *files)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        process.kill()
        assert not left_of(pids, within(1.0))
    assert len(pids) == 4


def test_what_a_rank_leaves_behind_ends_with_it(script: Callable[..., str], tmp_path: Path) -> None:
    done = run(script("mark('pid', subprocess.Popen(['sleep', '1000']).pid)"))
    assert done.returncode == 0
    assert not left_of([int((tmp_path / "pid").read_text())], within(1.0))


# -- output --------------------------------------------------------------------------------------------------------


def test_lines_of_ranks_never_interleave(script: Callable[..., str]) -> None:
    body = """
for number in range(1500):
    for part in (f"<{rank} {number} ", "x" * 200, ">\\n"):
        os.write(1, part.encode())
"""
    lines = run("--nproc-per-node", "4", script(body)).stdout.splitlines()
    assert len(lines) == 6000
    assert all(re.fullmatch(r"<[0-3] \d+ x{200}>", line) for line in lines)
    for rank in range(4):
        numbers = [int(line.split()[1]) for line in lines if line.startswith(f"<{rank}")]
        assert numbers == list(range(1500))


def test_output_is_passed_on_byte_for_byte(script: Callable[..., str]) -> None:
    start = b"\xff\xfe ok\r\n50%\r100%\r\n\x0b\x1b[1m\xc3\xa4 \xe2\x80\xa8\n"
    path = script(f"sys.stdout.buffer.write({start!r} + b'y' * 3_000_000 + b'\\n')")
    done = subprocess.run([*RUN, path], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True)
    assert done.stdout == start + b"y" * 3_000_000 + b"\n"


def test_redirects_and_tee_write_the_files_that_torchrun_writes(script: Callable[..., str], tmp_path: Path) -> None:
    body = "print('out', rank); print('err', rank, file=sys.stderr)"
    logs = tmp_path / "logs"
    options = ["--nproc-per-node", "3", "--log-dir", str(logs), "--rdzv-id", "name", "-r", "0:3", "-t", "1:1"]
    done = run(*options, script(body))
    (folder,) = logs.iterdir()
    assert folder.name.startswith("name_")
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.log")}
    assert files == {
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/0/stderr.log": "err 0\n",
        "attempt_0/1/stdout.log": "out 1\n",
    }
    assert sorted(done.stdout.splitlines()) == ["[default1]:out 1", "out 2"]
    assert sorted(done.stderr.splitlines()) == ["err 1", "err 2"]


def test_a_failure_tells_the_last_lines_of_a_redirected_rank(script: Callable[..., str], tmp_path: Path) -> None:
    done = run("-r", "3", "--log-dir", str(tmp_path / "logs"), script("print('in the file'); sys.exit(3)"))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.endswith("its last lines:\n  in the file\n")


def test_only_ranks_of_the_filter_are_shown(script: Callable[..., str]) -> None:
    done = run("--nproc-per-node", "3", "--local-ranks-filter", "0,2", script("print(rank)"))
    assert sorted(done.stdout.split()) == ["0", "2"]


def test_a_reader_that_leaves_ends_the_job(script: Callable[..., str], tmp_path: Path) -> None:
    body = "mark(f'pid{rank}', os.getpid())\nwhile True:\n    print('line'); time.sleep(0.001)"
    with running("--nproc-per-node", "2", script(body)) as process:
        await_files(process, tmp_path / "pid0", tmp_path / "pid1")
        assert process.stdout is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.wait(timeout=60) == 141
    assert not left_of([int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)], within(1.0))


def test_a_reader_that_is_slow_loses_nothing(script: Callable[..., str]) -> None:
    body = "for number in range(60_000):\n    os.write(1, b'%06d %s\\n' % (number, b'z' * 60))"
    with running(script(body)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("000000")
        time.sleep(1.5)  # longer than anything in the library waits for a reader
        assert sum(1 for _ in process.stdout) == 59_999
        assert process.wait(timeout=60) == 0


# -- the port ------------------------------------------------------------------------------------------------------


def test_a_reserved_port_is_given_to_nobody_else_and_can_be_listened_on() -> None:
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        others = [socket.socket() for _ in range(500)]
        for other in others:
            other.bind(("127.0.0.1", 0))
        assert port not in {other.getsockname()[1] for other in others}
        for other in others:
            other.close()
        with socket.create_server(("", port)):  # with SO_REUSEADDR, as torch's store
            pass


def test_a_port_that_somebody_listens_on_is_refused(script: Callable[..., str]) -> None:
    with socket.create_server(("", 0)) as server:
        done = run("--master-port", str(server.getsockname()[1]), script("print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be used for the rendezvous" in done.stderr


@pytest.mark.slow
def test_fifty_launches_at_once_have_ports_of_their_own(script: Callable[..., str]) -> None:
    body = """
import socket
port = int(os.environ["MASTER_PORT"])
if rank == 0:
    server = socket.create_server(("127.0.0.1", port))
    for _ in range(1):
        peer, _ = server.accept()
        print("met", peer.recv(100).decode() == os.environ["MARK"])
else:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).sendall(os.environ["MARK"].encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
"""
    path = script(body)
    started = [
        subprocess.Popen(
            [*RUN, "--nproc-per-node", "2", "--env", f"MARK={number}", path],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(50)
    ]  # fmt: skip
    ends = [(process.communicate(timeout=150), process.returncode) for process in started]
    assert ends == [(("met True\n", ""), 0)] * 50


# -- torch ---------------------------------------------------------------------------------------------------------

TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    loss = model(torch.full((8, 4), 0.1 * (rank + step))).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
weight = model.module.weight.sum()
line = f"rank {rank} of {dist.get_world_size()}: {total.item()} {loss.item():.6f} {weight.item():.6f}\\n"
sys.stdout.write(line)  # in one piece, since torchrun does not keep lines apart
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch makes a folder for compiled code as soon as it is asked for a DDP model."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_training_script_prints_the_same_as_under_torchrun(script: Callable[..., str], world_size: int) -> None:
    path = script(TRAIN)
    ours = run("--nproc-per-node", str(world_size), path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += ["--log-dir", str(Path(path).parent / "logs"), path]
    theirs = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ours.returncode == 0, ours.stderr
    assert theirs.returncode == 0, theirs.stderr
    assert sorted(ours.stdout.splitlines()) == sorted(theirs.stdout.splitlines())
    assert len(ours.stdout.splitlines()) == world_size


@pytest.mark.slow
@pytest.mark.usefixtures("caches")
def test_two_jobs_with_torch_at_once_meet_each_their_own(script: Callable[..., str]) -> None:
    path = script(TRAIN)
    with running("--nproc-per-node", "2", path) as one, running("--nproc-per-node", "2", path) as other:
        for process in (one, other):
            stdout, stderr = process.communicate(timeout=150)
            assert process.returncode == 0, stderr
            assert sorted(line.split(":")[0] for line in stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.slow
@pytest.mark.parametrize("end, code", [("os.kill(os.getpid(), 9)", 137), ("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_a_failure_ends_those_who_sit_in_an_all_reduce(
    script: Callable[..., str], tmp_path: Path, end: str, code: int
) -> None:
    body = f"""
import atexit, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
mark(f"pid{{rank}}", os.getpid())
if rank == 1:
    until("pid0"), until("pid2"), until("pid3")
    atexit.register(print, "its last function")
    mark("failed", time.monotonic())
    {end}
dist.all_reduce(torch.ones(1))
"""
    done = run("--nproc-per-node", "4", script(body))
    took = time.monotonic() - float((tmp_path / "failed").read_text())
    assert done.returncode == code, done.stderr
    assert "mpexec: rank 1 (local rank 1" in done.stderr
    assert done.stdout == ("" if "kill" in end else "its last function\n")
    assert not left_of([int((tmp_path / f"pid{rank}").read_text()) for rank in range(4)], within(0.1))
    assert took < within(1.0)


@pytest.mark.slow
def test_a_raise_under_record_is_told_while_others_sit_in_an_all_reduce(script: Callable[..., str]) -> None:
    body = """
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 1:
        raise ValueError("recorded")
    dist.all_reduce(torch.ones(1))

main()
"""
    done = run("--nproc-per-node", "3", script(body))
    assert done.returncode == 1
    assert "its error:" in done.stderr
    assert "mpexec: rank 1 (local rank 1" in done.stderr
    assert "ValueError: recorded" in done.stderr[done.stderr.index("its error:") :]
