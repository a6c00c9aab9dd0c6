"""The fixture `no_leaks`: runs of pytest of their own, each with many tests that leave something behind."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from plugin.inner import run

from mpexec.pytest_plugin.leaks import NoLeaks
from mpexec.pytest_plugin.snapshot import Snapshot

pytestmark = pytest.mark.timeout(300)

HEAD = """
import asyncio, multiprocessing, os, signal, socket, subprocess, sys, tempfile, threading, time
from multiprocessing.shared_memory import SharedMemory
import pytest
from mpexec import ModelAgent
from mpexec.pytest_plugin import snapshot

snapshot.BOUND_S = 1.0
pytestmark = pytest.mark.usefixtures("no_leaks")
kept = []

class Agent(ModelAgent):
    def echo(self, value):
        return value

@pytest.fixture
def mp_executor_options():
    return dict(start_method="fork", allow_unsafe_fork=True, device="cpu", init_process_group=False)

"""

LEAVES = {
    "process": (
        'kept.append(subprocess.Popen(["sleep", "1000"]))',
        r"process \d+ comm='sleep' .*; end it and wait for it",
    ),
    "grandchild": (
        """
        child = subprocess.Popen(["sh", "-c", "sleep 1000 & read line"], stdin=subprocess.PIPE)
        while not (found := open(f"/proc/{child.pid}/task/{child.pid}/children").read()):
            os.sched_yield()
        kept.append(child)
        """,
        r"process \d+ comm='sleep' .*parent=",
    ),
    "zombie": (
        """
        child = os.posix_spawnp("true", ["true"], os.environ)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        """,
        r"zombie \d+ comm='true' .*; wait for it: process.wait\(\)",
    ),
    "rank": (
        "from mpexec import MPExecutor\nkept.append(MPExecutor(Agent, world_size=1, device='cpu', _warn=False,"
        " start_method='fork', init_process_group=False, allow_unsafe_fork=True))",
        r"process \d+ comm='mpexec-rank0' .*; release the executor[^\0]*^  descriptor \d+ -> .* and \d+ more; close",
    ),
    "thread": (
        "over = threading.Event(); kept.append(over)\n"
        "threading.Thread(target=over.wait, name='reader', daemon=True).start()",
        r"thread 'reader' still runs; join it",
    ),
    "socket": ("kept.append(socket.socket())", r"descriptor \d+ -> socket:\[\d+\]; close it"),
    "file": ("kept.append(open(os.devnull))", r"descriptor \d+ -> /dev/null; close it"),
    "shared memory": (
        "kept.append(SharedMemory(create=True, size=16, name=f'left-{os.getpid()}'))",
        r"shared memory /dev/shm/left-\d+; unlink it",
    ),
    "environment": ("os.environ['LEFT'] = 'over'", r"environment LEFT was None and is 'over'; use monkeypatch.setenv"),
    "signal handler": (
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        r"signal handler of SIGUSR1 was .*; put it back: signal.signal",
    ),
    "task": (
        "kept.append(asyncio.get_running_loop().create_task(asyncio.Event().wait(), name='left over'))",
        r"task 'left over' still runs; await it, or cancel it",
    ),
    "noise": (
        "async def fails():\n    raise ValueError('unheard')\n"
        "task = asyncio.get_running_loop().create_task(fails())\nawait asyncio.wait([task])\ndel task",
        r"noise of asyncio: Task exception was never retrieved .*'unheard'.*; await or close",
    ),
    "noise on stderr": (
        "print('resource_tracker: There appear to be 1 leaked objects', file=sys.stderr)",
        r"noise on stderr: resource_tracker: There appear to be 1 leaked objects",
    ),
}

ALLOWING = """
KINDS = "process", "zombie", "thread", "descriptor", "shared memory", "environment", "signal handler", "task", "noise"

@pytest.fixture(autouse=True)
def allowing(no_leaks, request):
    for kind in () if "matches" in request.node.name else KINDS:
        no_leaks.allow(kind)

def test_the_process_lives():
    processes = [process for process in kept if isinstance(process, subprocess.Popen)]
    assert [process.poll() for process in processes] == [None]
    processes[0].kill()
    processes[0].wait()

def test_only_what_matches(no_leaks):
    no_leaks.allow("thread", "'pool-*")
    over = threading.Event()
    kept.append(over)
    for name in ("pool-1", "reader"):
        threading.Thread(target=over.wait, name=name, daemon=True).start()
"""

CLEAN = {
    "process": "subprocess.run(['true'])",
    "process_that_is_about_to_end": "threading.Thread(target=subprocess.Popen(['sleep', '0.2']).wait).start()",
    "thread_that_is_about_to_end": "threading.Timer(0.2, lambda: None).start()",
    "executor": "assert mp_executor(Agent).collective_rpc('echo', args=(1,)) == [1, 1]",
    "tracker": "memory = SharedMemory(create=True, size=16); memory.close(); memory.unlink()",
    "to_thread": "assert await asyncio.to_thread(int, '3') == 3",
    "task": "task = asyncio.get_running_loop().create_task(asyncio.sleep(0.1))",
}


def _tests(bodies: Mapping[str, str]) -> str:
    text = HEAD
    for name, body in bodies.items():
        kind = "async def" if "asyncio" in body else "def"
        lines = "\n".join(f"    {line.removeprefix(' ' * 8)}" for line in body.strip("\n").splitlines())
        text += f"{kind} test_{name.replace(' ', '_')}(mp_executor):\n{lines}\n\n"
    return text


def test_each_kind_of_leak_is_named_with_its_remedy(pytester: pytest.Pytester) -> None:
    result = run(pytester, _tests({name: body for name, (body, _) in LEAVES.items()}))
    result.assert_outcomes(passed=len(LEAVES), errors=len(LEAVES))
    output = result.stdout.str()
    reports = dict(zip(LEAVES, output.split("ERROR at teardown of test_")[1:], strict=True))
    for name, (_, said) in LEAVES.items():
        assert "the test left behind:" in reports[name]
        assert re.search(rf"^  {said}", reports[name], re.MULTILINE), f"{name}: {reports[name]}"


def test_what_is_put_right_or_ends_soon_or_serves_the_session_is_no_leak(pytester: pytest.Pytester) -> None:
    result = run(pytester, _tests(CLEAN))
    result.assert_outcomes(passed=len(CLEAN))


def test_leaks_that_are_allowed_are_overlooked_and_left_alone(pytester: pytest.Pytester) -> None:
    bodies = {name: body for name, (body, _) in LEAVES.items() if name not in ("rank", "grandchild")}
    source = _tests(bodies) + ALLOWING
    result = run(pytester, source)
    result.assert_outcomes(passed=len(bodies) + 2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_only_what_matches*", "  thread 'reader' still runs*"])
    result.stdout.no_fnmatch_line("*thread 'pool-1'*")


def test_a_name_in_shared_memory_is_a_leak_unless_another_user_owns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(f"/dev/shm/left-{os.getpid()}")
    snapshot = Snapshot()
    try:
        path.touch()
        now = time.monotonic()
        assert path.name in snapshot._new_shared_memory(now)
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        assert path.name not in snapshot._new_shared_memory(now)
    finally:
        snapshot.close()
        path.unlink()


def test_a_kind_that_does_not_exist_is_refused(no_leaks: NoLeaks) -> None:
    with pytest.raises(Exception, match=r"allow\('threads'\).*'thread'"):
        no_leaks.allow("threads")
