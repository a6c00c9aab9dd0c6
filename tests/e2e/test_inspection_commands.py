"""`mpexec ps` and `mpexec stack` on an executor with ranks that are at work, as another process sees it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpexec import ModelAgent
from mpexec.executor import inspection

COMMAND = [sys.executable, "-m", "mpexec"]

pytestmark = [pytest.mark.spawn, pytest.mark.timeout(180)]


class Working(ModelAgent):
    def wait_for(self, path: str) -> int:
        """Wait, without giving the interpreter to anybody, until a file is there."""
        while not os.path.exists(path):
            time.sleep(0.01)
        return self.rank

    def hold(self, seconds: int) -> None:
        """Be in C code with the interpreter held."""
        import ctypes

        ctypes.PyDLL(None).sleep(seconds)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tempfile.mkdtemp()
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    monkeypatch.setenv("MPEXEC_INSPECT", "1")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def executor(runtime: str, make_executor: Callable[..., Any]) -> Any:
    return make_executor(Working)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )


def rows() -> list[dict[str, Any]]:
    done = run("ps", "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def until_in_method(executor: Any, name: str) -> None:
    give_up = time.monotonic() + 60
    while [rank["method"] for rank in executor.describe()["ranks"]] != [name] * 2:
        assert time.monotonic() < give_up
        threading.Event().wait(0.005)


def test_ps_lists_a_driver_with_what_its_ranks_are_at_and_stack_shows_where(executor: Any, runtime: str) -> None:
    signal_file = os.path.join(runtime, "go on")
    call = executor.submit_rpc("wait_for", args=(signal_file,))
    until_in_method(executor, "wait_for")

    (row,) = rows()
    assert (row["pid"], row["kind"], row["state"], row["world_size"]) == (os.getpid(), "mp", "READY", 2)
    assert row["calls_in_flight"] == 1
    assert [rank["pid"] for rank in row["ranks"]] == list(executor.pids)
    assert {rank["method"] for rank in row["ranks"]} == {"wait_for"}
    table = run("ps").stdout
    assert f"{os.getpid()}  mp   READY     2 ranks  1 in flight" in table
    assert table.count("wait_for for ") == 2

    for pid in (os.getpid(), executor.pids[1]):  # a rank's driver is found by the rank as well
        shown = run("stack", str(pid)).stdout
        assert f"== driver {os.getpid()}" in shown
        assert "thread MainThread:" in shown
        assert f"== rank 1  process {executor.pids[1]}  wait_for" in shown
        assert shown.count("in wait_for") == 2
    answer = json.loads(run("stack", str(os.getpid()), "--json").stdout)
    assert list(answer) == ["pid", "executors", "threads"]
    assert "in wait_for" in answer["executors"][0]["stacks"]["1"]

    with open(signal_file, "w"):
        pass
    assert call.result(60) == [0, 1]  # nothing was disturbed
    executor.release()
    done = run("ps")
    assert (done.returncode, done.stdout) == (0, "")
    assert "MPEXEC_INSPECT=1" in done.stderr


def test_stacks_come_while_a_rank_holds_its_interpreter(executor: Any) -> None:
    executor.submit_rpc("hold", args=(60,))
    until_in_method(executor, "hold")
    stacks = executor.rank_stacks()
    assert all("in hold" in stacks[rank] for rank in (0, 1)), stacks
    executor.release()
    assert executor.rank_stacks() == {}


def test_a_broken_executor_is_still_listed_with_its_root_cause(executor: Any) -> None:
    executor.submit_rpc("hold", args=(60,))
    until_in_method(executor, "hold")
    os.kill(executor.pids[1], signal.SIGKILL)
    give_up = time.monotonic() + 30
    while executor.state.name != "BROKEN":
        assert time.monotonic() < give_up
        threading.Event().wait(0.005)
    (row,) = rows()
    assert row["state"] == "BROKEN"
    assert "WorkerDiedError" in row["root_cause"]
    assert "killed by SIGKILL" in run("ps").stdout


def test_an_executor_that_ends_while_it_is_looked_at_disturbs_nobody(
    runtime: str, make_executor: Callable[..., Any]
) -> None:
    over = threading.Event()
    failures: list[BaseException] = []

    def look() -> None:
        from mpexec.cli.drivers import find_drivers

        try:
            while not over.is_set():
                find_drivers("stacks")
        except BaseException as failed:
            failures.append(failed)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        for _ in range(5):
            executor = make_executor(Working)
            executor.collective_rpc("wait_for", args=("/",), timeout=60)
            executor.release()
            assert inspection._server is None
    finally:
        over.set()
        looking.join(30)
    assert failures == []
    assert os.listdir(os.path.join(runtime, "mpexec")) == []


DRIVER = """
import sys
from mpexec import ModelAgent, build_executor

class Idle(ModelAgent):
    pass

if __name__ == "__main__":
    executor = build_executor(Idle, world_size=1, backend="uni", init_process_group=False, device="cpu")
    print("up", flush=True)
    sys.stdin.read()
"""


def test_a_stopped_driver_is_named_and_a_killed_one_is_swept(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpexec.cli import drivers

    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"up\n"
        monkeypatch.setattr(drivers, "_ANSWER_S", 0.2)
        os.kill(driver.pid, signal.SIGSTOP)
        os.waitpid(driver.pid, os.WUNTRACED)
        (found,) = drivers.find_drivers()
        assert found.pid == driver.pid
        assert "it is stopped" in found.answer["error"]
        driver.kill()
        driver.wait()
        assert drivers.find_drivers() == []
        assert os.listdir(os.path.join(runtime, "mpexec")) == []
    finally:
        driver.kill()
        driver.communicate()


def test_a_driver_that_ends_without_release_leaves_no_socket(runtime: str) -> None:
    driver = subprocess.run([sys.executable, "-c", DRIVER], input=b"", capture_output=True, timeout=120, check=False)
    assert (driver.returncode, driver.stdout, driver.stderr) == (0, b"up\n", b"")
    assert os.listdir(os.path.join(runtime, "mpexec")) == []
