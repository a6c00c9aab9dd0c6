"""`MPExecutor.attach`: one script as a program and as a job, and the failure contract among processes of a launcher."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import leaks
import pytest
from patience import is_overloaded
from patience import within as within_load

from mpexec import ConfigError, ModelAgent, MPExecutor, StartupError, WrongStateError
from mpexec.deadline import Deadline
from mpexec.processes.environment import apply_changes
from mpexec.processes.launched import LaunchedJob
from mpexec.processes.meeting import Meeting, wait_for_lane

pytestmark = [pytest.mark.spawn, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).with_name("attached_script.py"))
LAUNCHERS = {
    "program": [],
    "mpexec run": ["-m", "mpexec", "run", "--nproc-per-node", "3"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"],
}
EVERY_WAY = ["program", "mpexec run", pytest.param("torchrun", marks=pytest.mark.slow)]
within = partial(within_load, stretch=5.0)  # each rank is an interpreter that starts
_numbers = itertools.count()


def job_variables(rank: int, world_size: int, run_id: str) -> dict[str, str | None]:
    """What a launcher tells a process."""
    return {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": run_id,
    }


class PlainJob:
    """A job whose launcher only starts it: what its processes do to each other is not mixed with what a launcher does.

    They are in the process group of the tests: a signal to that group would end the tests.
    """

    def __init__(self, *args: str, nproc: int = 3, ranks: range | None = None) -> None:
        self.run_id = f"tests-{os.getpid()}-{next(_numbers)}"
        self.nproc = nproc
        self.processes = {rank: self.start(rank, *args) for rank in (range(nproc) if ranks is None else ranks)}

    def environ(self, rank: int) -> dict[str, str]:
        return apply_changes(os.environ, job_variables(rank, self.nproc, self.run_id))

    def start(self, rank: int, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, SCRIPT, *args], env=self.environ(rank), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self, timeout: float = 60.0) -> dict[str, Any]:
        """Wait for all; what the driver found. The output of all is in `texts`, by rank."""
        ends = {rank: process.communicate(timeout=timeout) for rank, process in self.processes.items()}
        self.texts = {rank: "".join(end) for rank, end in ends.items()}
        return dict(json.loads(ends[0][0].splitlines()[-1])) if 0 in ends and ends[0][0] else {}

    @property
    def codes(self) -> list[int]:
        return [process.returncode for process in self.processes.values()]


@pytest.fixture
def plain() -> Iterator[Callable[..., PlainJob]]:
    """Starts plain jobs; whatever a test does, they are gone afterwards."""
    made: list[PlainJob] = []

    def start(*args: str, **options: Any) -> PlainJob:
        made.append(PlainJob(*args, **options))
        return made[-1]

    yield start
    for process in (process for job in made for process in job.processes.values()):
        process.kill()
        process.communicate()
    names = Path("/proc/net/unix").read_text()
    for job in made:
        found = LaunchedJob.find(job.environ(0))
        assert found is not None
        assert found.key not in names


def launched(way: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the script to its end in one of the three ways."""
    with tempfile.TemporaryDirectory() as logs:  # torchrun makes a folder for them, and leaves it
        launcher = [*LAUNCHERS[way], *(["--log-dir", logs] if way == "torchrun" else [])]
        return subprocess.run(
            [sys.executable, *launcher, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=100, check=False, cwd=ROOT,
        )  # fmt: skip


@contextlib.contextmanager
def launching(*args: str) -> Iterator[subprocess.Popen[str]]:
    """The script under `mpexec run`, while it runs."""
    process = subprocess.Popen(
        [sys.executable, *LAUNCHERS["mpexec run"], *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects of an output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def until(condition: Callable[[], Any]) -> None:
    """Wait for what nothing announces."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# -- one script, three ways ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_script_does_the_same_as_a_program_and_as_a_job(way: str) -> None:
    done = launched(way, SCRIPT, "work", "world_size=2")
    assert done.returncode == 0, done.stderr
    found = next(one for one in objects(done.stdout) if "where" in one)
    assert found["where"] == [[0, 2], [1, 2]]
    assert found["totals"] == [sum(range(200_000)), sum(range(200_000, 400_000))]
    assert found["back"] == [2 * sum(range(200_000))] * 2
    assert (found["same"], found["after"], found["kind"]) == (True, 2, "mp")
    assert found["caught"] == "as asked"
    assert "raised on rank 1" in found["notes"][0]
    workers = [one for one in objects(done.stdout) if "worker" in one]
    assert sorted(one["worker"] for one in workers) == ([] if way == "program" else ["1", "2"])


@pytest.mark.parametrize(
    "way", ["mpexec run", *(pytest.param(w, marks=pytest.mark.slow) for w in ("program", "torchrun"))]
)
def test_the_example_reduces_over_all_ranks(way: str) -> None:
    done = launched(way, "examples/attach.py")
    assert (done.returncode, done.stdout) == (0, "[3.5, 3.5]\n[4.5, 4.5]\n"), done.stderr


def test_the_driver_may_have_a_rank_of_its_own(plain: Callable[..., PlainJob]) -> None:
    job = plain("work", "driver_is_rank=true", nproc=2)
    found = job.end()
    assert job.codes == [0, 0], job.texts
    assert found["where"] == [[0, 2], [1, 2]]
    assert found["pids"][1] == job.processes[1].pid
    assert found["pids"][0] != job.processes[0].pid  # a child: the driver stays free


def test_ranks_see_their_own_variables_and_go_back_to_the_job(plain: Callable[..., PlainJob]) -> None:
    job = plain("variables")
    assert job.end()["variables"] == [["0", "2", None, "said", None], ["1", "2", None, "said", None]]
    assert job.codes == [0, 0, 0]
    for rank in (1, 2):
        assert objects(job.texts[rank]) == [{"worker": str(rank), "now": str(rank), "handler": True}]


@pytest.mark.slow
def test_two_jobs_at_once_find_each_their_own(plain: Callable[..., PlainJob]) -> None:
    jobs = [plain("work"), plain("work")]
    for job in jobs:
        assert set(job.end()["pids"]) == {job.processes[1].pid, job.processes[2].pid}


def test_a_restarted_job_attaches_again(tmp_path: Path) -> None:
    path = json.dumps(str(tmp_path / "tried"))
    command = [*LAUNCHERS["mpexec run"], "--max-restarts", "1", SCRIPT, "again", f"path={path}"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert [one["where"] for one in objects(done.stdout) if "where" in one] == [[[0, 2], [1, 2]]] * 2
    assert "restart 1 of 1" in done.stderr


@pytest.mark.slow
def test_a_script_may_take_long_to_end_in_a_worker(plain: Callable[..., PlainJob]) -> None:
    job = plain("linger")
    job.end()
    assert job.codes == [0, 0, 0], job.texts


# -- failures in a call ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, facts, reaped",
    [
        ("die", ("SIGKILL", None), True),
        ("exit", (None, 7), False),
        pytest.param("die", ("SIGKILL", None), False, marks=pytest.mark.slow),
        pytest.param("exit", (None, 7), True, marks=pytest.mark.slow),
    ],
)
def test_the_driver_hears_how_a_rank_has_ended(
    plain: Callable[..., PlainJob], kind: str, facts: tuple[str | None, int | None], reaped: bool
) -> None:
    job = plain("misdeed", f'kind="{kind}"')
    if reaped:  # by its launcher, at once
        threading.Thread(target=job.processes[2].wait, daemon=True).start()
    found = job.end()
    if reaped and found["signal_name"] is found["exit_code"] is None:
        pytest.skip("this kernel does not keep the exit status of a process that has been reaped")
    assert (found["error"], found["rank"], found["method"]) == ("WorkerDiedError", 1, "do")
    assert (found["signal_name"], found["exit_code"]) == facts
    assert found["seconds"] < within(2.0)
    assert "launchers end the job then" in job.texts[0]
    assert job.codes == [0, 0, 7 if kind == "exit" else -9]


def test_a_deadline_shows_the_stacks_and_breaks_the_executor(plain: Callable[..., PlainJob]) -> None:
    job = plain("misdeed", 'kind="sleep"', "timeout=0.3")
    found = job.end()
    assert (found["error"], found["missing_ranks"]) == ("RPCTimeoutError", [0, 1])
    assert found["seconds"] < within(0.8)
    for rank in "01":
        assert "attached_script.py" in found["stacks"][rank]
    if not is_overloaded():
        assert found["rungs"] == ["asked", "asked"]
        assert job.codes == [0, 0, 0]  # the failure is the driver's to tell


def test_a_worker_that_has_gone_back_to_its_script_is_not_signalled_for_its_stacks(
    plain: Callable[..., PlainJob], tmp_path: Path
) -> None:
    job = plain("stacks", f"path={json.dumps(str(tmp_path / 'has_'))}")
    found = job.end()
    assert found["error"] == "WorkerDiedError"
    assert found["stacks"] == dict.fromkeys("01", "<no stack: the process is gone>")
    assert job.codes == [0, 0, -9]


@pytest.mark.parametrize("kind", ["die", "release"])
def test_ranks_stuck_in_c_end_with_their_driver(plain: Callable[..., PlainJob], tmp_path: Path, kind: str) -> None:
    job = plain("stuck", f"path={json.dumps(str(tmp_path / 'stuck'))}", f'kind="{kind}"')
    job.processes[0].wait(timeout=60)
    began = time.monotonic()
    found = job.end()
    assert time.monotonic() - began < within(2.0)
    if kind == "die":
        assert job.codes == [-9, -9, -9]
    else:
        assert found["seconds"] < within(1.5)
        assert found["rungs"] == ["TERM", "TERM"]
        assert job.codes == [0, -15, -15]


def test_the_launcher_names_the_rank_that_was_killed() -> None:
    done = launched("mpexec run", SCRIPT, "misdeed", 'kind="die"')
    assert done.returncode == 137
    assert "mpexec: rank 2 (local rank 2" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_end_of_the_driver_is_the_root_cause_for_the_launcher(tmp_path: Path) -> None:
    done = launched("mpexec run", SCRIPT, "stuck", f"path={json.dumps(str(tmp_path / 'stuck'))}", 'kind="die"')
    assert done.returncode == 137
    assert "mpexec: rank 0 (local rank 0" in done.stderr


def test_ctrl_c_is_the_drivers_and_lets_the_workers_go(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    with launching(SCRIPT, "wait", f"path={json.dumps(str(path))}") as process:
        until(lambda: path.exists() and path.read_text())
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert {"interrupted": True} in objects(stdout)
        assert len([one for one in objects(stdout) if "worker" in one]) == 2
        assert not leaks.await_gone(map(int, path.read_text().split()), 2.0)


# -- failures of the start -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver_is_rank", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_that_cannot_be_built_fails_the_start_and_its_own_process(
    plain: Callable[..., PlainJob], driver_is_rank: bool
) -> None:
    nproc = 2 if driver_is_rank else 3
    job = plain("build", 'kind="raise"', f"driver_is_rank={json.dumps(driver_is_rank)}", nproc=nproc)
    found = job.end()
    assert (found["error"], found["cause"], found["rank"]) == ("StartupError", "MyError", 1)
    assert job.codes == [0, *([] if driver_is_rank else [0]), 1]
    assert job.texts[nproc - 1].count("MyError: as asked") == 1


@pytest.mark.parametrize("kind, cause", [("raise", "MyError"), ("die", "WorkerDiedError")])
def test_the_drivers_own_rank_fails_the_start_while_others_are_waited_for(
    plain: Callable[..., PlainJob], kind: str, cause: str
) -> None:
    job = plain("build_first", f'kind="{kind}"', ranks=range(2))  # the third never comes
    found = job.end()
    assert (found["error"], found["cause"], found["rank"]) == ("StartupError", cause, 0)
    assert found["phase"] == "build model"
    assert found["seconds"] < within(5.0)  # far from init_timeout
    assert job.codes == [0, 0]  # the one that had come is let go


def test_a_rank_that_dies_while_it_builds_fails_the_start(plain: Callable[..., PlainJob]) -> None:
    job = plain("build", 'kind="die"')
    found = job.end()
    assert (found["error"], found["cause"], found["phase"]) == ("StartupError", "WorkerDiedError", "build model")
    assert job.codes == [0, 0, -9]


def test_a_process_that_does_not_come_is_named_and_the_others_are_let_go(plain: Callable[..., PlainJob]) -> None:
    job = plain("meet", "seconds=1.5", ranks=range(2))
    found = job.end()
    assert found["error"] == "StartupError"
    assert "2 of the job (of 3) did not call MPExecutor.attach" in found["text"]
    assert job.codes == [0, 0]


def test_a_driver_that_does_not_come_is_not_waited_for_longer_than_asked(plain: Callable[..., PlainJob]) -> None:
    job = plain("meet", "seconds=0.5", ranks=range(1, 2))
    began = time.monotonic()
    job.end()
    assert time.monotonic() - began < within(5.0)


def test_a_process_that_ends_before_all_have_come_is_named(plain: Callable[..., PlainJob]) -> None:
    job = plain("wait_for_another", ranks=range(2))
    found = job.end()
    assert found["error"] == "StartupError"
    assert f"process 1 of the job (pid {job.processes[1].pid}) killed by SIGKILL" in found["text"]


def test_a_driver_that_ends_while_others_are_waited_for_lets_them_go(
    plain: Callable[..., PlainJob], tmp_path: Path
) -> None:
    job = plain("wait_for_another", f"path={json.dumps(str(tmp_path / 'met'))}", ranks=range(2))
    until((tmp_path / "met").exists)
    job.processes[0].kill()
    job.end()
    assert job.codes == [-9, 0]


@pytest.mark.slow
def test_ctrl_c_while_others_are_waited_for_ends_all(plain: Callable[..., PlainJob], tmp_path: Path) -> None:
    job = plain("wait_for_another", f"path={json.dumps(str(tmp_path / 'met'))}", ranks=range(2))
    until((tmp_path / "met").exists)
    for process in job.processes.values():
        process.send_signal(signal.SIGINT)
    job.end()
    assert job.codes[0] == -signal.SIGINT
    assert "KeyboardInterrupt" in job.texts[0]
    assert job.codes[1] in (0, -signal.SIGINT)  # let go, or interrupted itself


# -- names -----------------------------------------------------------------------------------------------------------


def job_of_tests(rank: int = 0, world_size: int = 2) -> LaunchedJob:
    """A job that only this test knows."""
    return LaunchedJob(rank, world_size, f"tests-{os.getpid()}-{next(_numbers)}")


def test_a_name_that_somebody_has_is_said_at_once() -> None:
    job = job_of_tests()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as squatter:
        squatter.bind(f"\0mpexec-attach-{job.key}-0")
        with pytest.raises(StartupError, match="process 0 of the job cannot attach: Address already in use"):
            Meeting(job, 0)


def test_what_is_not_a_hello_is_dropped() -> None:
    job = job_of_tests()
    with Meeting(job, 0) as meeting, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        for content in (b"", b"hello 1", b"hello x", b"hello 99", b"\x80" * 1000):
            other.sendto(content, f"\0mpexec-attach-{job.key}-0")
        with pytest.raises(StartupError, match="process 1 of the job"):
            meeting.wait(Deadline.after(0.2))


def test_a_flood_does_not_keep_the_deadline_from_coming() -> None:
    job = job_of_tests()
    ended = threading.Event()

    def flood(name: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    other.sendto(b"x", socket.MSG_DONTWAIT, name)

    for rank, wait in ((0, meet_others), (1, wait_for_lane)):
        thread = threading.Thread(target=flood, args=(f"\0mpexec-attach-{job.key}-{rank}",))
        thread.start()
        with pytest.raises(StartupError, match=r"MPExecutor\.attach"):
            wait(LaunchedJob(rank, 2, job.key), Deadline.after(0.2))
        ended.set()
        thread.join()
        ended.clear()


def meet_others(job: LaunchedJob, deadline: Deadline) -> None:
    with Meeting(job, 0) as meeting:
        meeting.wait(deadline)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_another_user_sends_is_dropped() -> None:
    job = job_of_tests()
    hello = f"""
import array, os, socket
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
    fds = array.array("i", [os.pidfd_open(os.getpid())])
    other.sendmsg([b"hello 1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)], 0, "\\0mpexec-attach-{job.key}-0")
"""
    with Meeting(job, 0) as meeting:
        subprocess.run([sys.executable, "-c", hello], check=True, timeout=60)
        with pytest.raises(StartupError, match="process 1 of the job"):
            meeting.wait(Deadline.after(0.2))


# -- what is refused -------------------------------------------------------------------------------------------------

JOB = job_variables(0, 3, "refused")
REFUSED = [
    (None, {}, "world_size is missing"),
    ({**JOB, "MASTER_PORT": None}, {}, "RANK and WORLD_SIZE is set, but MASTER_PORT is not"),
    ({**JOB, "RANK": "x"}, {}, "RANK='x'"),
    ({**JOB, "RANK": "3"}, {}, "RANK=3 and WORLD_SIZE=3"),
    ({**JOB, "RANK": "-1"}, {}, "RANK='-1'"),
    ({**JOB, "LOCAL_WORLD_SIZE": "1"}, {}, "RayExecutor is the way to several"),
    (JOB, {"world_size": 3}, "world_size=3, but a job of 3 processes gives 2 ranks with driver_is_rank=False"),
    (JOB, {"world_size": 2, "driver_is_rank": True}, "gives 3 ranks with driver_is_rank=True"),
    (job_variables(0, 1, "refused"), {}, "one process, which is the driver"),
    (JOB, {"env": {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"}}, "env sets NCCL_DEBUG"),
    (JOB, {"nonsense": 1}, "unknown options"),
    (JOB, {"init_timeout": 0}, "init_timeout=0"),
]


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("environ, options, message", REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_work_is_refused_in_every_process_before_it_waits(
    monkeypatch: pytest.MonkeyPatch, rank: str, environ: Any, options: dict[str, Any], message: str
) -> None:
    for name, value in (environ or {}).items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    if environ is not None and environ["RANK"] == "0" and environ["WORLD_SIZE"] != "1":
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(ConfigError) as caught:
        MPExecutor.attach(ModelAgent, **options)
    assert message in str(caught.value)


def test_attach_warns_at_the_line_that_calls_it() -> None:
    with pytest.warns(DeprecationWarning, match="build_executor") as caught:
        MPExecutor.attach(ModelAgent, world_size=1, device="cpu", init_process_group=False).release()
    assert [warning.filename for warning in caught] == [__file__]


def test_a_job_is_attached_once(plain: Callable[..., PlainJob]) -> None:
    job = plain("twice")
    found = job.end()
    assert found["error"] == "WrongStateError"
    assert "once in a job" in found["text"]
    assert job.codes == [0, 0, 0]


async def test_attach_is_refused_on_a_running_loop_and_off_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(WrongStateError, match="before the event loop runs"):
        MPExecutor.attach(ModelAgent)
    errors: list[BaseException] = []

    def attach() -> None:
        try:
            MPExecutor.attach(ModelAgent)
        except WrongStateError as error:
            errors.append(error)

    thread = threading.Thread(target=attach)
    thread.start()
    thread.join()
    assert "in the main thread" in str(errors[0])
