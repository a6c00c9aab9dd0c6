"""Rank processes: started three ways, watched, logged, ended; with nothing left behind after each test."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import queue
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_entries

from mpexec.deadline import Deadline
from mpexec.errors import ConfigError, StartupError, WrongStateError
from mpexec.processes import (
    Death,
    Monitor,
    RankPlan,
    RankProcess,
    end_processes,
    launch,
    rank_environment,
    refuse_while_importing_main,
    shutdown_fork_server,
)
from mpexec.processes import fork_server as fork_server_module
from mpexec.processes.logs import LineSplitter
from mpexec.processes.streams import PatientWriter

pytestmark = pytest.mark.spawn

SOON = 30.0
START_METHODS = ["spawn", "forkserver", "fork"]
_ROOT = Path(__file__).parents[2]


def _children() -> set[str]:
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    shutdown_fork_server()  # one that tests of other modules have left warm
    gc.collect()
    before = set(os.listdir("/proc/self/fd")), _children(), set(threading.enumerate())
    yield
    shutdown_fork_server()
    gc.collect()
    after = set(os.listdir("/proc/self/fd")), _children(), set(threading.enumerate())
    assert after == before


class Ranks:
    """Launched and watched ranks; what the monitor reports is kept in queues."""

    def __init__(self, entry: str, n: int = 1, *, start_method: str = "spawn", payload: bytes = b"") -> None:
        self.messages: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self.processes = launch(
            [RankPlan(rank) for rank in range(n)],
            start_method=start_method,  # type: ignore[arg-type]
            entry=f"rank_entries:{entry}",
            payload=payload,
            allow_unsafe_fork=True,
            preload=(),
        )
        self.monitor = Monitor()
        for process in self.processes:
            self.monitor.watch(process, self._on_message, self.deaths.put)

    def _on_message(self, rank: int, message: Any, fds: list[int]) -> None:
        self.messages.put((rank, message))

    def next(self, kind: str) -> Any:
        """The next message of a kind, without it; a failure is raised."""
        while True:
            _, message = self.messages.get(timeout=SOON)
            if message[0] == "failed":
                raise message[2].to_exception()
            if message[0] == kind:
                return message[1]

    def death(self) -> Death:
        return self.deaths.get(timeout=SOON)

    def close(self) -> None:
        end_processes(self.processes, Deadline.after(0.0), ask=None)
        self.monitor.stop()
        for process in self.processes:
            process.close()


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    with contextlib.ExitStack() as stack:

        def start(*args: Any, **kwargs: Any) -> Ranks:
            started = Ranks(*args, **kwargs)
            stack.callback(started.close)
            return started

        yield start


class Ended:
    """Waits for processes that are not ours to reap."""

    def __init__(self, *pids: int) -> None:
        self._pidfds = [os.pidfd_open(pid) for pid in pids]

    def within(self, seconds: float) -> bool:
        deadline = Deadline.after(seconds)
        try:
            return all(self._wait(pidfd, deadline) for pidfd in self._pidfds)
        finally:
            for pidfd in self._pidfds:
                os.close(pidfd)

    @staticmethod
    def _wait(pidfd: int, deadline: Deadline) -> bool:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(deadline.poll_ms()))


def run_script(body: str, *, stdin: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a driver program of its own, with the package and the entries on its path."""
    path = os.pathsep.join((str(_ROOT), str(Path(__file__).parent)))
    program = textwrap.dedent(body)
    command = [sys.executable, "-"] if stdin else [sys.executable, "-c", program]
    return subprocess.run(
        command,
        input=program if stdin else None,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# Starting


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_rank_gets_payload_environment_and_descriptors(start_method: str, tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.write_text("content")
    os.environ["MPEXEC_REMOVED"] = "of the driver"
    environment = dict(os.environ)
    file = os.open(path, os.O_RDONLY)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        env = {"MPEXEC_TEST": "of the rank", "MPEXEC_REMOVED": None}
        (process,) = launch(
            [RankPlan(3, env, {"file": file}, "a title")],
            start_method=start_method,  # type: ignore[arg-type]
            entry="rank_entries:echo",
            payload=bytes(100_000),
            allow_unsafe_fork=True,
            preload=(),
        )
        while (message := process.lane.recv(Deadline.after(SOON))[0])[0] != "facts":
            assert message[0] == "phase", message
        facts = message[1]
        title = Path(f"/proc/{process.pid}/comm").read_text().strip()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        os.close(file)
        assert dict(os.environ) == environment
        del os.environ["MPEXEC_REMOVED"]
    rungs = end_processes([process], Deadline.after(SOON), ask=lambda p: p.lane.close())
    process.close()
    assert rungs == {3: "asked"}
    assert process.death is not None
    assert process.death.exit_code == 0
    assert title == "a title"
    assert facts["payload"] == bytes(100_000)
    assert (facts["env"], facts["removed"], facts["file"]) == ("of the rank", None, b"content")
    assert facts["pid"] == facts["group"] == process.pid
    assert facts["driver"] == os.getpid()
    assert (facts["sigint"], facts["sigterm"], facts["blocked"]) == (True, True, [])
    assert (facts["stdin"], facts["executable"]) == ("/dev/null", sys.executable)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_phases_are_reported_in_order(start_method: str, ranks: Any) -> None:
    started = ranks("say", start_method=start_method)
    phases = [started.messages.get(timeout=SOON)[1][1] for _ in range(2 if start_method == "fork" else 3)]
    assert phases == ["interpreter", "import main", "import entry"] or (
        start_method == "fork" and phases == ["interpreter", "import entry"]
    )


@pytest.mark.parametrize("start_method", START_METHODS)
def test_ranks_do_not_share_a_random_state(start_method: str, ranks: Any) -> None:
    started = ranks("draw", 2, start_method=start_method)
    assert started.next("drawn") != started.next("drawn")


def test_an_import_error_before_the_entry_is_reported_with_its_phase(ranks: Any) -> None:
    started = ranks("no_such_entry")
    with pytest.raises(AttributeError, match="no_such_entry"):
        started.next("facts")
    assert started.death().exit_code == 1


def test_a_rank_that_cannot_be_started_takes_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen
    pids: list[int] = []

    def popen(*args: Any, **kwargs: Any) -> Any:
        if len(pids) == 2:
            raise OSError(11, "no more processes")
        started = real(*args, **kwargs)
        pids.append(started.pid)
        return started

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(StartupError, match="no more processes") as caught:
        launch([RankPlan(r) for r in range(3)], start_method="spawn", entry="rank_entries:say", payload=b"")
    assert caught.value.rank == 2
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_second_launch_uses_the_warm_fork_server_and_a_killed_one_is_replaced(ranks: Any) -> None:
    def server() -> int:
        return next(iter(fork_server_module._servers.values())).pid

    ranks("say", start_method="forkserver").next("here")
    first = server()
    alive = ranks("say", start_method="forkserver")
    alive.next("here")
    assert server() == first
    os.kill(first, signal.SIGKILL)
    assert Ended(first).within(SOON)
    assert alive.processes[0].poll_death() is None
    ranks("say", start_method="forkserver").next("here")
    assert server() != first
    alive.processes[0].send_signal(signal.SIGKILL)
    death = alive.death()
    assert (death.exit_code, death.signal_name) == (None, None)
    assert "not known" in death.describe()


def test_a_stopped_fork_server_delays_the_facts_of_deaths_by_one_second_in_all(ranks: Any) -> None:
    started = ranks("say", 4, start_method="forkserver")
    for _ in range(4):
        started.next("here")
    server = next(iter(fork_server_module._servers.values()))
    os.kill(server.pid, signal.SIGSTOP)
    begin = time.monotonic()
    for process in started.processes:
        process.send_signal(signal.SIGKILL)
    assert [started.death().exit_code for _ in range(4)] == [None] * 4
    assert 0.9 < time.monotonic() - begin < 4.0


def test_an_entry_read_at_import_starts_a_fork_server_of_its_own() -> None:
    def start(env: dict[str, str | None]) -> RankProcess:
        return launch([RankPlan(0, env)], start_method="forkserver", entry="rank_entries:say", payload=b"", preload=())[
            0
        ]

    processes = [start({"MKL_VERBOSE": "0"}), start({"MKL_VERBOSE": "1"}), start({"MKL_VERBOSE": "0", "OTHER": "1"})]
    assert len(fork_server_module._servers) == 2
    end_processes(processes, Deadline.after(0.0), ask=None)
    for process in processes:
        process.close()
    shutdown_fork_server()
    shutdown_fork_server()


def test_a_fork_server_that_cannot_start_a_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="fork server died") as caught:
        launch(
            [RankPlan(0, {"PYTHONHOME": "/nonexistent"})],
            start_method="forkserver",
            entry="rank_entries:say",
            payload=b"",
            preload=(),
        )
    assert caught.value.phase == "fork server"


def test_fork_is_refused_with_threads_or_torch() -> None:
    done = run_script(
        """
        import sys, threading, types
        from mpexec.processes import launch, RankPlan
        from mpexec.errors import ConfigError

        def refused():
            try:
                launch([RankPlan(0)], start_method="fork", entry="rank_entries:say", payload=b"")[0].close()
            except ConfigError as error:
                return str(error)
        print("alone", refused())
        event = threading.Event()
        threading.Thread(target=event.wait).start()
        print("thread", refused())
        event.set()
        sys.modules["torch"] = types.ModuleType("torch")
        print("torch", refused())
        """
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines["alone"] == "None", done.stderr
    assert "2 threads are running" in lines["thread"]
    assert "torch is imported" in lines["torch"]


def test_a_forked_rank_runs_nothing_of_its_parent_at_exit() -> None:
    done = run_script(
        """
        import atexit, os, signal, weakref
        from mpexec.processes import launch, RankPlan
        driver = os.getpid()
        class Thing: pass
        thing = Thing()
        weakref.finalize(thing, lambda: print("finalizer", os.getpid() == driver))
        atexit.register(lambda: print("atexit", os.getpid() == driver))
        signal.signal(signal.SIGTERM, lambda *_: print("handler"))
        print("unflushed", end="")
        for method in ("fork", "forkserver"):
            p, = launch([RankPlan(0)], start_method=method, entry="rank_entries:say", payload=b"", preload=())
            while p.lane.recv(__import__("mpexec.deadline").deadline.Deadline.after(20))[0][0] != "here": pass
            p.lane.send("end")
            __import__("select").select([p.pidfd.fd], [], [])
            print(p.poll_death().exit_code)
            p.close()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "unflushed0\n0\natexit True\nfinalizer True\n"


def test_a_driver_that_ignores_sigchld_or_restores_sigpipe_can_launch() -> None:
    done = run_script(
        """
        import signal, subprocess
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        from mpexec.deadline import Deadline
        from mpexec.processes import launch, RankPlan, end_processes
        from mpexec.transport.lane import LaneClosed
        for method in ("spawn", "forkserver"):
            entry = "rank_entries:wait_for_a_child"
            p, = launch([RankPlan(0)], start_method=method, entry=entry, payload=b"", preload=())
            while (message := p.lane.recv(Deadline.after(20))[0])[0] == "phase":
                pass
            print(message, end_processes([p], Deadline.after(5), ask=None), p.death.describe())
            try:
                p.lane.send("to nobody")
            except LaneClosed:
                print("closed")
            p.close()
        """
    )
    assert (done.stderr, done.returncode) == ("", 0)
    first, _, second, _ = done.stdout.splitlines()
    assert first.startswith("('child', 7) {0: 'TERM'} ended; its exit status is not known")
    assert second == "('child', 7) {0: 'TERM'} killed by SIGTERM (sent by mpexec)"


@pytest.mark.parametrize("stdin", [True, False])
def test_a_script_without_a_file_can_launch(stdin: bool) -> None:
    done = run_script(
        """
        from mpexec.deadline import Deadline
        from mpexec.processes import launch, RankPlan, end_processes, main_is_importable
        ps = launch([RankPlan(0), RankPlan(1)], start_method="spawn", entry="rank_entries:say", payload=b"")
        for p in ps:
            while (message := p.lane.recv(Deadline.after(20))[0])[0] != "here":
                assert message[0] == "phase", message
        print(main_is_importable(), end_processes(ps, Deadline.after(5), ask=lambda p: p.lane.send("end")))
        """,
        stdin=stdin,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("False {0: 'asked', 1: 'asked'}\n", "", 0)


def test_a_daemonic_process_can_launch_and_the_start_method_stays_unset(tmp_path: Path) -> None:
    done = run_script(
        """
        import multiprocessing
        from mpexec.deadline import Deadline
        from mpexec.processes import launch, RankPlan, end_processes

        def drive():
            p, = launch([RankPlan(0)], start_method="spawn", entry="rank_entries:say", payload=b"")
            while p.lane.recv(Deadline.after(20))[0][0] != "here":
                pass
            print(multiprocessing.current_process().daemon, end_processes([p], Deadline.after(5), ask=None), flush=True)
        drive()
        assert multiprocessing.get_start_method(allow_none=True) is None
        child = multiprocessing.get_context("fork").Process(target=drive, daemon=True)
        child.start()
        child.join()
        """
    )
    assert (done.stdout, done.stderr) == ("False {0: 'TERM'}\nTrue {0: 'TERM'}\n", "")


def test_a_missing_main_guard_is_named(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(
            """
            from mpexec.deadline import Deadline
            from mpexec.processes import launch, RankPlan
            p, = launch([RankPlan(0)], start_method="spawn", entry="rank_entries:say", payload=b"")
            while (message := p.lane.recv(Deadline.after(20))[0])[0] == "phase":
                print(message[1])
            print(type(message[2].to_exception()).__name__, message[2].text)
            __import__("select").select([p.pidfd.fd], [], [])
            print(p.poll_death().exit_code)
            """
        )
    )
    path = os.pathsep.join((str(_ROOT), str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("interpreter\nimport main\nStartupError"), done.stderr
    assert 'if __name__ == "__main__":' in done.stdout
    assert done.stdout.endswith("\n1\n")


def test_a_rank_may_launch_once_it_has_imported_main(ranks: Any) -> None:
    ranks("build_nested").next("allowed")
    refuse_while_importing_main()


def test_rank_environment_replaces_that_of_an_outer_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "ROLE_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "outer")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    changes = rank_environment(1, 4, {"WORLD_SIZE": "user", "MINE": None}, threads=2)
    assert changes == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "user",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": None,
        "TORCHELASTIC_RUN_ID": None,
        "ROLE_RANK": None,
        "GROUP_RANK": None,
        "OMP_NUM_THREADS": "2",
        "MINE": None,
    }
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in rank_environment(1, 4, {}, threads=2)


# The end of the driver

_DRIVER = """
    import sys, time
    from mpexec.deadline import Deadline
    from mpexec.processes import launch, RankPlan
    p, = launch([RankPlan(0)], start_method=sys.argv[1], entry="rank_entries:hold_the_gil", payload=b"", preload=())
    while (message := p.lane.recv(Deadline.after(20))[0])[0] != "pids":
        assert message[0] == "phase", message
    print(*message[1:], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_killed_driver_takes_a_rank_in_c_code_and_its_grandchild_along(start_method: str) -> None:
    path = os.pathsep.join((str(_ROOT), str(Path(__file__).parent)))
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_DRIVER), start_method],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        ended = Ended(*pids)
        driver.kill()
        assert ended.within(2.0)


def test_a_killed_driver_takes_a_rank_along_that_imports_main(tmp_path: Path) -> None:
    script = tmp_path / "slow_main.py"
    script.write_text(
        textwrap.dedent(
            """
            import ctypes, os, sys
            from mpexec.processes import launch, RankPlan
            if __name__ == "__main__":
                p, = launch([RankPlan(0)], start_method="spawn", entry="rank_entries:say", payload=b"")
                sys.stdin.read()
            else:
                os.write(os.open(os.environ["REPORT"], os.O_RDWR), b"%d" % os.getpid())
                ctypes.PyDLL(None).sleep(60)
            """
        )
    )
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    report = os.open(fifo, os.O_RDWR)
    path = os.pathsep.join((str(_ROOT), str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": path, "REPORT": str(fifo)}
    with subprocess.Popen([sys.executable, script], env=environment, stdin=subprocess.PIPE) as driver:
        ended = Ended(int(os.read(report, 100)))
        driver.kill()
        assert ended.within(2.0)
    os.close(report)


def test_a_program_that_ends_without_cleaning_up_leaves_no_rank_and_no_noise() -> None:
    done = run_script(
        """
        from mpexec.deadline import Deadline
        from mpexec.processes import launch, RankPlan, Monitor
        import queue, sys
        got = queue.Queue()
        ps = launch([RankPlan(0), RankPlan(1)], start_method="spawn", entry="rank_entries:write_much", payload=b"20000")
        monitor = Monitor()
        for p in ps:
            monitor.watch(p, lambda rank, message, fds: got.put(message), print)
        while got.get(timeout=20)[0] != "written":
            pass
        # one write, so that no line of a rank comes between
        sys.stdout.write("pids" + "".join(f" {p.pid}" for p in ps) + "\\n")
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    (pids,) = re.findall(r"^pids (\d+) (\d+)$", done.stdout, re.MULTILINE)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            assert Ended(int(pid)).within(2.0)


# The end of a rank


@pytest.mark.parametrize("start_method", START_METHODS)
def test_an_exit_status_is_a_fact(start_method: str, ranks: Any) -> None:
    death = ranks("exit_with_3", start_method=start_method).death()
    assert (death.rank, death.exit_code, death.signal_name, death.sent_by_us) == (0, 3, None, False)
    assert death.describe() == "exited with code 3"


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_is_a_fact_and_not_ours(start_method: str, number: signal.Signals, ranks: Any) -> None:
    death = ranks("kill_itself", start_method=start_method, payload=b"%d" % number).death()
    assert (death.exit_code, death.signal_name, death.sent_by_us) == (None, number.name, False)
    assert "not by mpexec" in death.describe()
    assert not death.out_of_memory


def test_a_signal_that_we_sent_is_ours(ranks: Any) -> None:
    started = ranks("say")
    started.next("here")
    started.processes[0].send_signal(signal.SIGTERM)
    death = started.death()
    assert (death.signal_name, death.sent_by_us) == ("SIGTERM", True)


def test_a_kill_for_memory_is_hinted_at(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = ranks("say")
    started.next("here")
    started.monitor.stop()
    monkeypatch.setattr("mpexec.processes.process.memory_kills", lambda: 1 << 40)
    os.kill(started.processes[0].pid, signal.SIGKILL)
    assert Ended(started.processes[0].pid).within(SOON)
    death = started.processes[0].poll_death()
    assert death.out_of_memory
    assert "out of memory" in death.describe()
    assert started.processes[0].poll_death() is death


def test_a_child_that_somebody_else_reaped_is_dead_with_unknown_status(ranks: Any) -> None:
    started = ranks("say")
    started.next("here")
    started.monitor.stop()
    os.kill(started.processes[0].pid, signal.SIGKILL)
    os.waitpid(started.processes[0].pid, 0)
    death = started.processes[0].poll_death()
    assert (death.exit_code, death.signal_name) == (None, None)
    assert "not known" in death.describe()
    assert started.processes[0].state() == "gone"


def test_all_messages_come_before_the_death(ranks: Any) -> None:
    started = ranks("last_words")
    with contextlib.suppress(Exception):
        started.processes[0].lane.send("never read")
    assert started.death().exit_code == 5
    words = []
    while not started.messages.empty():
        words.append(started.messages.get()[1])
    assert [number for kind, number in words if kind == "word"] == list(range(10))


@pytest.mark.parametrize("flag", [1 << 2, 1 << 30], ids=["by pidfd", "by number, as on an older kernel"])
@pytest.mark.parametrize("payload", [b"", b"exit"])
def test_the_end_of_a_rank_ends_its_process_group(
    payload: bytes, flag: int, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpexec.processes.process._PIDFD_SIGNAL_PROCESS_GROUP", flag)
    started = ranks("with_grandchild", payload=payload)
    grandchild = Ended(started.next("grandchild"))
    if not payload:
        os.kill(started.processes[0].pid, signal.SIGKILL)
    started.death()
    assert grandchild.within(SOON)


def test_signals_never_reach_a_process_that_was_reaped(ranks: Any) -> None:
    started = ranks("exit_with_3")
    started.death()
    started.processes[0].send_signal(signal.SIGKILL)
    started.processes[0].send_signal(signal.SIGKILL, group=False)
    assert started.processes[0].death.exit_code == 3


def test_the_state_of_a_process_is_what_the_kernel_says(ranks: Any) -> None:
    started = ranks("say")
    started.next("here")
    (process,) = started.processes
    assert process.state() == "running"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert process.state() == "stopped"
    started.monitor.stop()
    process.send_signal(signal.SIGKILL)
    assert Ended(process.pid).within(SOON)
    assert process.state() == "zombie"
    process.poll_death()
    assert process.state() == "gone"


def test_a_forked_child_of_the_driver_cannot_touch_the_ranks(ranks: Any) -> None:
    started = ranks("say")
    started.next("here")
    pid = os.fork()
    if pid == 0:
        try:
            started.processes[0].send_signal(signal.SIGKILL)
            assert started.processes[0].poll_death() is None
            started.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert started.processes[0].poll_death() is None
    started.processes[0].lane.send("end")
    assert started.death().exit_code == 0


# The ladder


def test_each_rank_is_ended_by_the_lowest_rung_that_works(ranks: Any) -> None:
    asked, ignoring, stopped, dead = (ranks(e) for e in ("say", "ignore_term", "say", "exit_with_3"))
    for started in (asked, ignoring, stopped):
        started.next("here")
    dead.death()
    stopped.processes[0].send_signal(signal.SIGSTOP)
    for rank, started in enumerate((asked, ignoring, stopped, dead)):
        started.processes[0].rank = rank
    processes = [started.processes[0] for started in (asked, ignoring, stopped, dead)]
    rungs = end_processes(processes, Deadline.after(1.0), ask=lambda p: p.lane.send("end"))
    assert rungs == {0: "asked", 1: "KILL", 2: "KILL", 3: "exited"}
    assert [p.death.sent_by_us for p in processes] == [False, True, True, False]
    assert set(end_processes(processes, Deadline.after(0.0), ask=None).values()) == {"exited"}


def test_without_asking_sigterm_comes_first_and_grandchildren_end_too(ranks: Any) -> None:
    started = ranks("with_grandchild")
    grandchild = Ended(started.next("grandchild"))
    assert end_processes(started.processes, Deadline.after(SOON), ask=None) == {0: "TERM"}
    assert grandchild.within(SOON)


def test_an_unkillable_process_is_named_and_does_not_hold_the_caller(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = ranks("say")
    started.next("here")
    (process,) = started.processes
    started.monitor.stop()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(RankProcess, "poll_death", lambda self: None)
        patch.setattr(RankProcess, "send_signal", lambda self, number, group=True: None)
        begin = time.monotonic()
        assert end_processes([process], Deadline.after(0.2), ask=lambda p: None) == {0: "unkillable"}
        assert time.monotonic() - begin < 5.0
    assert f"pid={process.pid}" in caplog.text


# Output


@pytest.mark.parametrize("start_method", START_METHODS)
def test_what_was_written_before_an_abort_is_in_the_last_lines(start_method: str, ranks: Any) -> None:
    death = ranks("abort_after_writing", start_method=start_method).death()
    assert death.signal_name == "SIGABRT"
    assert "from python" in death.last_lines
    assert "from printf" in death.last_lines
    assert any(line.startswith("boom") for line in death.last_lines)
    assert any("abort_after_writing" in line for line in death.last_lines)  # the crash report


def test_lines_are_shown_whole_and_with_their_rank(ranks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    started = ranks("write_much", 2, payload=b"1000")
    started.next("written")
    started.next("written")
    for process in started.processes:
        process.lane.send("end")
    assert {started.death().exit_code, started.death().exit_code} == {0}
    started.close()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"[rank {r}] line {n}" for r in (0, 1) for n in range(1000))
    assert started.processes[0].death.last_lines == tuple(f"line {n}" for n in range(800, 1000))


def test_a_closed_driver_stream_neither_stops_ranks_nor_their_log(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = io.StringIO()
    broken.close()
    monkeypatch.setattr(sys, "stdout", broken)
    started = ranks("write_much", payload=b"50000")
    started.next("written")
    started.processes[0].lane.send("end")
    death = started.death()
    assert death.exit_code == 0
    assert death.last_lines[-1] == "line 49999"
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stdout", replaced)
    again = ranks("write_much", payload=b"3")
    again.next("written")
    again.processes[0].lane.send("end")
    again.death()
    again.close()
    assert replaced.getvalue().endswith("[rank 0] line 0\n[rank 0] line 1\n[rank 0] line 2\n")


def test_a_driver_that_does_not_read_costs_a_rank_one_second_and_counted_lines() -> None:
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    writer = PatientWriter(write_end)
    with io.TextIOWrapper(writer, line_buffering=True) as stream:  # type: ignore[type-var]
        begin = time.monotonic()
        for number in range(5000):
            stream.write(f"line {number} {'x' * 50}\n")
        assert 0.9 < time.monotonic() - begin < 5.0
        splitter = LineSplitter()
        lines = []
        for text in ("after\n", "later\n"):
            with contextlib.suppress(BlockingIOError):
                while True:
                    lines += splitter.feed(os.read(read_end, 1 << 16))
            stream.write(text)
        lines += splitter.feed(os.read(read_end, 1 << 16))
    assert lines[-2:] == ["after", "later"]
    (note,) = [line for line in lines if "dropped" in line]
    assert note == f"[{5000 - len(lines) + 3} lines dropped: the driver did not read]"
    assert all(line == f"line {n} {'x' * 50}" for n, line in enumerate(lines[:-3]))
    os.close(read_end)
    os.close(write_end)


def test_a_write_that_found_room_for_a_part_leaves_no_torn_line_unmarked() -> None:
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    writer = PatientWriter(write_end)
    assert writer.write(b"y" * 200_000 + b"\nsecond\n") == 200_008
    got = os.read(read_end, 1 << 20)
    assert set(got) == {ord("y")}
    assert len(got) < 200_000
    writer.write(b"third\n")
    assert os.read(read_end, 1 << 20) == b"\n[2 lines dropped: the driver did not read]\nthird\n"
    writer.close()
    os.close(read_end)
    os.close(write_end)


def test_lines_are_cut_out_of_any_chunks() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == ["one"]
    assert splitter.feed(b"o\r\n\n\xff") == ["two", ""]
    assert splitter.finish() == ["\\xff"]
    assert splitter.finish() == []
    parts = splitter.feed(b"z" * 150_000 + b"\n")
    assert [len(part) for part in parts] == [65536, 65536, 150_000 - 2 * 65536]
    assert sum(len(part) for part in splitter.feed(b"z" * 100_000)) == 65536


# The monitor


def test_a_removed_callback_is_not_running_any_more() -> None:
    monitor = Monitor()
    read_end, write_end = os.pipe()
    entered, leave = threading.Event(), threading.Event()

    def callback() -> None:
        entered.set()
        leave.wait(SOON)

    monitor.add(read_end, callback)
    os.write(write_end, b"x")
    assert entered.wait(SOON)
    remover = threading.Thread(target=monitor.remove, args=(read_end,))
    remover.start()
    remover.join(0.05)
    assert remover.is_alive()
    leave.set()
    remover.join(SOON)
    assert not remover.is_alive()
    os.close(read_end)
    os.close(write_end)
    monitor.remove(read_end)
    monitor.stop()
    monitor.stop()
    with pytest.raises(WrongStateError):
        monitor.add(0, callback)


def test_a_callback_that_raises_is_logged_and_removed_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor()
    read_end, write_end = os.pipe()
    other_read, other_write = os.pipe()
    happened: queue.SimpleQueue[str] = queue.SimpleQueue()

    def bad() -> None:
        raise RuntimeError("of the callback")

    def good() -> None:
        happened.put(os.read(other_read, 1).decode())

    monitor.add(read_end, bad)
    monitor.add(other_read, good)
    os.write(write_end, b"x")
    os.write(other_write, b"1")
    assert happened.get(timeout=SOON) == "1"
    os.write(other_write, b"2")
    assert happened.get(timeout=SOON) == "2"
    monitor.stop()
    assert caplog.text.count("RuntimeError: of the callback") == 1
    for fd in (read_end, write_end, other_read, other_write):
        os.close(fd)


def test_the_timer_fires_at_its_time_and_again_when_it_is_moved() -> None:
    monitor = Monitor()
    due: list[int | None] = [None]
    fired: queue.SimpleQueue[int] = queue.SimpleQueue()

    def fire() -> None:
        due[0] = None
        fired.put(time.monotonic_ns())

    monitor.set_timer(lambda: due[0], fire)
    for delay in (0, 20_000_000):
        at = due[0] = time.monotonic_ns() + delay
        monitor.wake()
        assert fired.get(timeout=SOON) >= at
    assert fired.empty()
    monitor.stop()


def test_a_monitor_may_be_stopped_on_its_own_thread() -> None:
    monitor = Monitor()
    read_end, write_end = os.pipe()
    monitor.add(read_end, monitor.stop)
    thread = monitor._thread
    os.write(write_end, b"x")
    thread.join(SOON)
    assert not thread.is_alive()
    monitor.stop()
    os.close(read_end)
    os.close(write_end)


def test_a_driver_stream_that_nobody_reads_does_not_delay_the_news_of_a_death() -> None:
    """The driver's stdout is a full pipe; a death must still be told at once."""
    read_end, write_end = os.pipe()
    done = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import os, queue, signal, sys, time
                from mpexec.processes import launch, RankPlan, Monitor
                got, deaths = queue.Queue(), queue.Queue()
                ps = launch([RankPlan(0), RankPlan(1)], start_method="spawn", entry="rank_entries:write_much",
                            payload=b"200000")
                monitor = Monitor()
                for p in ps:
                    tell = lambda death: deaths.put((time.time(), death))
                    monitor.watch(p, lambda rank, message, fds: got.put(message), tell)
                for _ in ps:
                    while got.get(timeout=30)[0] != "written":
                        pass
                begin = time.time()
                os.kill(ps[1].pid, signal.SIGKILL)
                at, death = deaths.get(timeout=30)
                sys.stderr.write(f"{death.signal_name} {at - begin:.3f}\\n")
                monitor.stop()
                os._exit(0)
                """
            ),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(_ROOT), str(Path(__file__).parent)))},
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = done.communicate(timeout=60)
    os.close(read_end)
    os.close(write_end)
    name, seconds = errors.split()
    assert name == "SIGKILL"
    assert float(seconds) < 0.5


def test_refusals_are_config_errors() -> None:
    assert issubclass(ConfigError, ValueError)
    assert rank_entries.say.__doc__
