"""What happens to the driver, where it comes from, and how it ends; seen from outside wherever that matters."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import socket
import subprocess
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import leaks
import pytest
from faults.agents import HostAgent
from faults.drivers import Driver, Pipe
from faults.watching import LOAD, within

from mpexec import State, WorkerDiedError

pytestmark = pytest.mark.spawn

GONE_S = 2.0
Make = Callable[..., Any]
Start = Callable[..., Driver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts programs, and ends those that still run after the test."""
    started: list[Driver] = []

    def start(body: str, **options: Any) -> Driver:
        started.append(Driver(tmp_path, body, **options))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path)
    yield pipe
    pipe.close()


def check_gone(pids: set[int] | list[int]) -> None:
    left = leaks.await_gone(pids, GONE_S * LOAD)
    assert not left, [leaks.describe_process(pid) for pid in left]


# -- the driver is killed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("doing", ["idle", "sleep", "hold_interpreter", "wait_in_all_reduce"])
def test_nothing_outlives_a_killed_driver(start: Start, pipe: Pipe, doing: str, start_method: str) -> None:
    # F094, F097
    driver = start(
        f"""
        executor = make(init_process_group={doing == "wait_in_all_reduce"})
        children = executor.collective_rpc("start_children")
        say(executor.pids, [pid for pair in children for pid in pair])
        executor.submit_rpc({doing!r}, args=({pipe.path!r},))
        threading.Event().wait()
        """,
        start_method=start_method,
    )
    pids, grandchildren = driver.hear()
    assert sorted(pipe.pids(2)) == sorted(pids)
    everything = {*pids, *grandchildren, *driver.family()}
    driver.kill()
    check_gone(everything)
    assert not leaks.NOISE.search(driver.stderr)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("manner", ["hang_python", "hang_c"])
def test_ranks_that_still_import_do_not_outlive_a_killed_driver(
    start: Start, pipe: Pipe, manner: str, start_method: str
) -> None:  # F023, F094
    env = {"MPEXEC_FAULT_MOMENT": "before_import", "MPEXEC_FAULT_MANNER": manner, "MPEXEC_FAULT_RANK": "1"}
    driver = start(
        f"""
        from faults.early import LateAgent
        make(LateAgent, env={ {**env, "MPEXEC_FAULT_ANNOUNCE": pipe.path}!r})
        """,
        start_method=start_method,
    )
    pipe.pids(1)
    everything = driver.family()
    assert len(everything) >= 2
    driver.kill()
    check_gone(everything)
    assert "Traceback" not in driver.stderr


def test_a_process_that_the_program_forked_does_not_keep_ranks_alive(start: Start, pipe: Pipe) -> None:
    driver = start(
        f"""
        executor = make()
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
        say(executor.pids, pid)
        executor.submit_rpc("sleep", args=({pipe.path!r},))
        threading.Event().wait()
        """
    )
    pids, forked = driver.hear()
    pipe.pids(2)
    driver.kill()
    try:
        check_gone(pids)
        assert not leaks.is_gone(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_stopped_rank_does_not_outlive_a_killed_driver(start: Start) -> None:  # F100
    driver = start("executor = make(); say(executor.pids); threading.Event().wait()")
    (pids,) = driver.hear()
    os.kill(pids[1], signal.SIGSTOP)
    driver.kill()
    check_gone(pids)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_blocked_call_ends_the_program_with_one_traceback(start: Start, pipe: Pipe) -> None:  # F088
    driver = start(f"executor = make(); say(executor.pids); executor.collective_rpc('sleep', args=({pipe.path!r},))")
    (pids,) = driver.hear()
    pipe.pids(2)
    driver.interrupt()
    # One `stop_timeout` for the ranks, which sit in a method that never ends.
    assert driver.end(5.0 * LOAD) == -signal.SIGINT
    check_gone(pids)
    assert driver.stderr.count("Traceback") == 1
    assert driver.stderr.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_in_a_blocked_call_leaves_the_executor_usable(start: Start, pipe: Pipe) -> None:
    driver = start(
        f"""
        with make() as executor:
            say(executor.pids)
            try:
                executor.collective_rpc(nap, args=({pipe.path!r},))
            except KeyboardInterrupt:
                say(executor.collective_rpc("echo", args=("still here",), timeout=30.0))
        """,
        head="""
        def nap(worker, path):
            from faults.misdeeds import announce
            announce(path)
            time.sleep(0.5)
            return "late"
        """,
    )
    (pids,) = driver.hear()
    pipe.pids(2)
    driver.interrupt()
    assert driver.hear() == [[["still here", 0], ["still here", 1]]]
    assert driver.end() == 0
    check_gone(pids)
    assert driver.stderr == ""


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_ctrl_c_while_ranks_start_gives_one_traceback(start: Start, pipe: Pipe, start_method: str) -> None:  # F088
    env = {"MPEXEC_FAULT_MOMENT": "before_import", "MPEXEC_FAULT_MANNER": "hang_python", "MPEXEC_FAULT_RANK": "0"}
    driver = start(
        f"""
        from faults.early import LateAgent
        make(LateAgent, env={ {**env, "MPEXEC_FAULT_ANNOUNCE": pipe.path}!r})
        """,
        start_method=start_method,
    )
    pipe.pids(1)
    everything = driver.family()
    driver.interrupt()
    assert driver.end(5.0 * LOAD) == -signal.SIGINT
    check_gone(everything)
    assert driver.stderr.count("Traceback") == 1


# -- the program ends and has not released -----------------------------------------------------------------------------

# A daemon thread may live to see its call end while the interpreter goes down: as by `stop`, not as by a death.
WAITING = """
def wait(executor):
    from mpexec import ExecutorStoppedError
    try:
        executor.collective_rpc("sleep", args=("",))
    except ExecutorStoppedError:
        pass
"""
ENDINGS = {
    "plain_end": ("executor = make(); say(executor.pids)", 0),
    "exit_code": ("executor = make(); say(executor.pids); sys.exit(3)", 3),
    "unhandled_exception": ("executor = make(); say(executor.pids); raise LookupError('mine')", 1),
    "reference_cycle": ("executor = make(); executor.me = executor; say(executor.pids); del executor", 0),
    "module_level_dict": ("json.kept = {'executor': make()}; say(json.kept['executor'].pids)", 0),
    "started": ("executor = make(); executor.start(); say(executor.pids)", 0),
    "call_in_flight": ("executor = make(); f = executor.submit_rpc('chatter'); say(executor.pids)", 0),
    "waiting_thread": (
        "executor = make(); say(executor.pids); threading.Thread(target=wait, args=(executor,), daemon=True).start()",
        0,
    ),
    "own_exit": ("executor = make(); say(executor.pids); os._exit(7)", 7),
    "after_a_death": (
        "executor = make(); say(executor.pids); executor.submit_rpc('end').exception()",
        0,
    ),
}


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_that_ends_without_release_leaves_nothing_and_says_nothing(
    start: Start, ending: str, start_method: str
) -> None:  # F053, F077
    body, code = ENDINGS[ending]
    driver = start(body, head=WAITING, start_method=start_method)
    (pids,) = driver.hear()
    assert driver.end(20.0) == code
    check_gone(pids)
    if ending == "unhandled_exception":
        assert driver.stderr.count("Traceback") == 1 and driver.stderr.rstrip().endswith("LookupError: mine")
    else:
        assert driver.stderr == ""


def test_a_program_ends_at_once_after_a_failed_start(start: Start) -> None:  # F025
    env = {"MPEXEC_FAULT_MOMENT": "before_import", "MPEXEC_FAULT_MANNER": "raise", "MPEXEC_FAULT_RANK": "1"}
    driver = start(
        f"""
        from faults.early import LateAgent
        from mpexec import StartupError
        try:
            make(LateAgent, env={env!r})
        except StartupError as error:
            say(str(error))
        """
    )
    assert "rank 1" in driver.hear()[0]
    with within(GONE_S):
        assert driver.end() == 0
    assert driver.stderr == ""


def test_lines_of_ranks_do_not_disturb_the_end_of_the_interpreter(start: Start) -> None:  # F079
    for _ in range(5):
        driver = start("executor = make(); executor.collective_rpc('chatter'); sys.stderr.write('up\\n')")
        _read_to_end(driver)
        assert driver.end() == 0
        assert driver.stderr == "up\n"


def _read_to_end(driver: Driver) -> None:
    assert driver.process.stdout is not None
    assert driver.process.stdout.read().count(b"[rank 0] line") >= 0


# -- where an executor is made -----------------------------------------------------------------------------------------


def test_an_executor_outlives_the_thread_that_made_it(make_executor: Make) -> None:  # F091, F095
    made: list[Any] = []
    for start_method in ("spawn", "forkserver"):
        builder = threading.Thread(target=lambda m=start_method: made.append(make_executor(HostAgent, start_method=m)))
        builder.start()
        builder.join()
    gc.collect()
    for executor in made:
        assert executor.collective_rpc("echo", args=(1,)) == [(1, 0), (1, 1)]


def test_the_whole_life_of_an_executor_fits_into_a_thread(make_executor: Make) -> None:  # F091
    results: list[Any] = []

    async def life() -> None:
        async with make_executor(HostAgent) as executor:
            results.append(await executor.collective_rpc_async("echo", args=(2,)))

    thread = threading.Thread(target=lambda: asyncio.run(life()))
    thread.start()
    thread.join()
    assert results == [[(2, 0), (2, 1)]]


async def test_an_executor_can_be_made_inside_a_running_loop(make_executor: Make) -> None:  # F029, F116
    executor = make_executor(HostAgent)  # as a notebook's cell does
    assert executor.collective_rpc("echo", args=(3,)) == [(3, 0), (3, 1)]
    assert await executor.collective_rpc_async("echo", args=(3,)) == [(3, 0), (3, 1)]
    await executor.stop_async()
    await executor.release_async()
    assert executor.state is State.RELEASED


def test_an_executor_works_on_uvloop_and_on_one_loop_after_another(make_executor: Make) -> None:  # F116, F128
    uvloop = pytest.importorskip("uvloop")
    executor = make_executor(HostAgent)

    async def use() -> Any:
        await executor.start_async()
        waiting = asyncio.ensure_future(executor.wait_tasks())
        value = await executor.collective_rpc_async("echo", args=(4,))
        await executor.stop_async()
        await waiting
        return value

    for factory in (uvloop.new_event_loop, asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            assert runner.run(use()) == [(4, 0), (4, 1)]


def test_a_death_is_told_on_uvloop(make_executor: Make) -> None:
    uvloop = pytest.importorskip("uvloop")
    executor = make_executor(HostAgent)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, pytest.raises(WorkerDiedError) as caught:
        runner.run(executor.collective_rpc_async("end"))
    assert caught.value.rank == 1


def test_an_executor_works_in_a_daemonic_process(start: Start) -> None:
    driver = start(
        """
        import multiprocessing
        process = multiprocessing.get_context("spawn").Process(target=life, daemon=True)
        process.start()
        process.join()
        say(process.exitcode)
        """,
        head="""
        def life():
            with make() as executor:
                say(executor.collective_rpc("echo", args=(5,)), executor.pids)
        """,
    )
    values, pids = driver.hear()
    assert values == [[5, 0], [5, 1]]
    assert driver.hear() == [0]
    assert driver.end() == 0
    check_gone(pids)
    assert driver.stderr == ""


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("stdin", [False, True], ids=["file", "stdin"])
def test_classes_of_the_script_itself_cross_both_ways(start: Start, stdin: bool, start_method: str) -> None:  # F041
    driver = start(
        """
        with make(MyAgent) as executor:
            try:
                executor.collective_rpc("fail", args=(MyError("seven", 7),))
            except MyError as error:
                say(error.args, error.number, type(error.__cause__).__name__)
            say([value.content for value in executor.collective_rpc("back", args=(MyValue(8),))])
        """,
        head="""
        class MyError(Exception):
            def __init__(self, text, number):
                super().__init__(text, number)
                self.number = number

        class MyValue:
            def __init__(self, content):
                self.content = content

        class MyAgent(ModelAgent):
            def fail(self, error):
                if self.rank == 1:
                    raise error
            def back(self, value):
                return MyValue(value.content + self.rank)
        """,
        stdin=stdin,
        start_method=start_method,
    )
    assert driver.hear() == [["seven", 7], 7, "RemoteTraceback"]
    assert driver.hear() == [[8, 9]]
    assert driver.end() == 0
    assert driver.stderr == ""


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_missing_main_guard_is_named(start: Start, start_method: str) -> None:  # F029
    driver = start("executor = make(); say(executor.pids)", guarded=False, start_method=start_method)
    with within(10.0):
        assert driver.end(60.0) == 1
    last = driver.stderr.rstrip().rpartition("StartupError")[2]
    assert 'if __name__ == "__main__":' in last
    assert not leaks.NOISE.search(driver.stderr)


# -- beside others -----------------------------------------------------------------------------------------------------


def test_two_executors_in_one_process_do_not_know_of_each_other(make_executor: Make) -> None:  # F082, F101, F103
    first = make_executor(HostAgent, init_process_group=True)
    second = make_executor(HostAgent, init_process_group=True)
    assert first.collective_rpc("add_up", args=(0,)) == [1, 1]
    assert second.collective_rpc("add_up", args=(1,)) == [3, 3]
    os.kill(first.pids[0], signal.SIGKILL)
    with pytest.raises(Exception, match="SIGKILL"):
        while True:  # until the death has been seen
            first.collective_rpc("echo", args=(0,))
    assert second.collective_rpc("add_up", args=(1,)) == [3, 3]
    first.release()
    assert second.collective_rpc("add_up", args=(1,)) == [3, 3]


def test_two_drivers_on_one_machine_do_not_know_of_each_other(start: Start) -> None:  # F103
    body = """
    executor = make(init_process_group=True)
    say(executor.pids, executor.collective_rpc("add_up", args=(1,)))
    for _ in range(200):
        assert executor.collective_rpc("add_up", args=(1,)) == [3, 3]
    executor.release()
    say("done")
    """
    first, second = start(body), start(body)
    pids, value = first.hear()
    assert value == [3, 3]
    assert second.hear()[1] == [3, 3]
    first.kill()
    assert second.hear() == ["done"]
    assert second.end() == 0
    assert second.stderr == ""
    check_gone(pids)


OUTER_JOB = {
    "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
    "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "outer",
}  # fmt: skip


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_the_variables_of_an_outer_job_do_not_reach_the_ranks(
    make_executor: Make, monkeypatch: pytest.MonkeyPatch, start_method: str
) -> None:  # F118
    for name, value in OUTER_JOB.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    executor = make_executor(HostAgent, start_method=start_method, init_process_group=True)
    assert executor.collective_rpc("add_up", args=(0,)) == [1, 1]
    for rank, seen in enumerate(executor.collective_rpc("environment", args=tuple(OUTER_JOB))):
        assert (seen["RANK"], seen["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert seen["TORCHELASTIC_RUN_ID"] is seen["TORCHELASTIC_USE_AGENT_STORE"] is seen["GROUP_RANK"] is None
        assert seen["MASTER_ADDR"] != OUTER_JOB["MASTER_ADDR"]
    assert dict(os.environ) == before


def test_a_taken_master_port_is_no_obstacle(make_executor: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # F101
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        executors = [make_executor(HostAgent, init_process_group=True) for _ in range(3)]
        assert [executor.collective_rpc("add_up", args=(0,)) for executor in executors] == [[1, 1]] * 3


def test_proxies_and_a_long_temporary_folder_are_no_obstacle(
    make_executor: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # F106, F109
    for name in ("http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 150)))
    executor = make_executor(HostAgent, init_process_group=True)
    assert executor.collective_rpc("add_up", args=(0,)) == [1, 1]


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_no_route_and_no_network_but_loopback_is_needed(start: Start) -> None:  # F107, F110
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    alone = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if unshare is None or ip is None or not _succeeds([*alone, "true"]):
        pytest.skip("this machine does not give us a network of our own")
    driver = start(
        "with make(init_process_group=True) as executor: say(executor.collective_rpc('add_up', args=(0,)))",
        command=tuple(alone),
    )
    assert driver.hear() == [[1, 1]]
    assert driver.end() == 0


# -- the host program stays as it was ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn", None])
def test_the_programs_own_start_method_is_left_alone(start: Start, method: str | None) -> None:  # F112
    driver = start(
        f"""
        import multiprocessing
        {f"multiprocessing.set_start_method({method!r})" if method else ""}
        json.mark_of_the_driver = True
        with make() as executor:
            copied = executor.collective_rpc("marker", args=("json",))
        say(copied, multiprocessing.get_start_method(allow_none=True))
        """
    )
    assert driver.hear() == [[False, False], method]
    assert driver.end() == 0
    assert driver.stderr == ""


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_the_programs_signal_handlers_stay_and_are_not_called(start: Start, start_method: str) -> None:  # F092
    driver = start(
        """
        called = []
        numbers = [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
        for number in numbers:
            signal.signal(number, lambda number, frame: called.append(number))
        before = [signal.getsignal(number) for number in numbers]
        try:
            with make() as executor:
                try:
                    executor.collective_rpc("sleep", args=("",), timeout=0.3)
                except Exception as error:
                    first = type(error).__name__
            with make() as executor:
                try:
                    executor.collective_rpc("end")
                except Exception as error:
                    second = type(error).__name__
        finally:
            # The kernel itself tells a parent of its children's ends.
            others = sorted({int(number) for number in called if number != signal.SIGCHLD})
            say(first, second, before == [signal.getsignal(number) for number in numbers], others)
        """,
        start_method=start_method,
    )
    assert driver.hear() == ["RPCTimeoutError", "WorkerDiedError", True, []]
    assert driver.end() == 0
    assert driver.stderr == ""


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    "ending",
    ["os._exit(0)", "sys.exit(0)", "executor.stop(); executor.release(); sys.exit(0)", "del executor; sys.exit(0)"],
    ids=["os_exit", "sys_exit", "release", "del"],
)
def test_a_fork_of_the_program_can_end_as_it_likes(start: Start, ending: str, start_method: str) -> None:  # F083, F115
    driver = start(
        f"""
        executor = make()
        executor.start()
        executor.collective_rpc("echo", args=(0,))
        pid = os.fork()
        if pid == 0:
            held = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
            import gc
            gc.collect()
            for fd in held:
                os.fstat(fd)
            {ending}
        _, status = os.waitpid(pid, 0)
        value = executor.collective_rpc("echo", args=(1,), timeout=30.0)
        executor.stop()
        executor.release()
        say(os.waitstatus_to_exitcode(status), value)
        """,
        start_method=start_method,
    )
    assert driver.hear() == [0, [[1, 0], [1, 1]]]
    assert driver.end() == 0
    assert driver.stderr == ""


def test_a_fork_of_the_program_cannot_call_the_ranks_of_its_parent(start: Start) -> None:
    driver = start(
        """
        executor = make()
        pid = os.fork()
        if pid == 0:
            try:
                executor.collective_rpc("echo", args=("child",), timeout=1.0)
            except Exception as error:
                say(type(error).__module__.partition(".")[0])
            os._exit(0)
        os.waitpid(pid, 0)
        for number in range(100):
            assert executor.collective_rpc("echo", args=(number,)) == [(number, 0), (number, 1)]
        executor.release()
        say("parent")
        """
    )
    assert driver.hear() == ["mpexec"]
    assert driver.hear() == ["parent"]
    assert driver.end() == 0
    assert driver.stderr == ""


def test_a_fork_of_the_program_cannot_call_the_thread_of_its_parent(start: Start) -> None:
    driver = start(
        """
        from mpexec import UniExecutor
        executor = UniExecutor(HostAgent, device="cpu", init_process_group=False)
        pid = os.fork()
        if pid == 0:
            try:
                executor.collective_rpc("echo", args=("child",))
            except Exception as error:
                say(type(error).__name__)
            executor.stop()
            executor.release()
            os._exit(0)
        os.waitpid(pid, 0)
        say(executor.collective_rpc("echo", args=("parent",)))
        executor.release()
        """
    )
    assert driver.hear() == ["WrongStateError"]
    assert driver.hear() == [[["parent", 0]]]
    assert driver.end() == 0
    assert driver.stderr == ""


def test_a_fork_of_the_program_has_an_executor_of_its_own(start: Start) -> None:  # F113
    driver = start(
        """
        executor = make()
        pid = os.fork()
        if pid == 0:
            with make() as own:
                say(own.collective_rpc("echo", args=("child",)))
            os._exit(0)
        os.waitpid(pid, 0)
        say(executor.collective_rpc("echo", args=("parent",)))
        executor.release()
        """
    )
    assert driver.hear() == [[["child", 0], ["child", 1]]]
    assert driver.hear() == [[["parent", 0], ["parent", 1]]]
    assert driver.end() == 0
    assert driver.stderr == ""


def test_released_descriptors_are_not_closed_again(make_executor: Make) -> None:  # F055, F083
    executor = make_executor(HostAgent)
    executor.collective_rpc("echo", args=(bytes(1 << 20),))
    executor.release()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    del executor
    gc.collect()
    for fd in files:
        os.fstat(fd)
        os.close(fd)


# -- what ranks have started -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("ending", ["release", "rank_killed"])
def test_grandchildren_end_with_their_rank(make_executor: Make, ending: str, start_method: str) -> None:  # F097
    executor = make_executor(HostAgent, start_method=start_method)
    grandchildren = {pid for pair in executor.collective_rpc("start_children") for pid in pair}
    assert len(grandchildren) == 4 and not any(map(leaks.is_gone, grandchildren))
    if ending == "rank_killed":
        with pytest.raises(WorkerDiedError):
            executor.collective_rpc("end")
    else:
        executor.release()
    check_gone(grandchildren)


def test_a_stopped_rank_does_not_hold_the_release(make_executor: Make) -> None:  # F080
    executor = make_executor(HostAgent, stop_timeout=2.0)
    os.kill(executor.pids[1], signal.SIGSTOP)
    with within(2.5):
        executor.release()
    assert executor.describe()["ranks"][1]["ended_by"] == "KILL"
    check_gone(list(executor.pids))


def test_dead_ranks_do_not_hold_the_release(make_executor: Make) -> None:  # F080
    executor = make_executor(HostAgent)
    for pid in executor.pids:
        os.kill(pid, signal.SIGKILL)
    with within(2.0):
        executor.release()
    assert executor.describe()["ranks"][0]["ended_by"] in ("exited", "asked")


def test_an_interpreter_that_cannot_even_start_its_site_fails_the_start(
    make_executor: Make, tmp_path: Path
) -> None:  # F023
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import os
            if os.environ.get("RANK") == "1":
                os.write(2, b"too early\\n")
                os._exit(9)
            """
        )
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with within(5.0), pytest.raises(Exception) as caught:
        make_executor(HostAgent, start_method="spawn", env={"PYTHONPATH": path})
    assert "rank 1" in str(caught.value) and "exited with code 9" in str(caught.value)
    assert "too early" in str(caught.value)
