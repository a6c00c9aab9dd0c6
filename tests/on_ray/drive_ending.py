"""Programs that have started no cluster: each way in which such a program can end is one of them.

The first argument says which, the second is the named pipe in which the ranks announce what they do.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import leaks
import ray
import ray._private.services

from mpexec import ExecutorBrokenError, RayExecutor, State, WorkerDiedError
from on_ray.agents import Agent
from on_ray.meeting import meeting

OPTIONS = {"world_size": 2, "device": "cpu", "init_process_group": False}


def say(value: Any) -> None:
    print(json.dumps([value]), flush=True)


def settings() -> Any:
    return dict(os.environ), {number: signal.getsignal(number) for number in signal.valid_signals()}


def forget() -> RayExecutor:
    """Neither stopped nor released."""
    executor = RayExecutor(Agent, **OPTIONS)
    executor.start()
    say(executor.pids)
    assert executor.collective_rpc("echo", args=(1,)) == [(1, 0), (1, 1)]
    return executor


def release() -> RayExecutor:
    """The cluster that was started for an executor goes with it; the next one has a new one, and is forgotten."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    os.environ["MPEXEC_OF_THE_USER"] = "kept"
    before, children = settings(), leaks.children_of(os.getpid())
    with RayExecutor(Agent, **OPTIONS) as executor:
        assert settings() == before
        daemons = leaks.children_of(os.getpid()) - children
        assert daemons
        assert executor.collective_rpc("echo", args=(1,)) == [(1, 0), (1, 1)]
    assert not ray.is_initialized()
    assert settings() == before
    left = leaks.await_gone({*daemons, *executor.pids}, 5.0)
    assert not left, [leaks.describe_process(pid) for pid in left]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mpexec")]
    say("released")
    again = forget()
    assert settings() == before
    return again


def hang(manner: str) -> None:
    """Sit in a call that no rank answers, until the process is killed."""
    executor = RayExecutor(Agent, **OPTIONS)
    say(executor.pids)
    executor.submit_rpc("announced", args=(sys.argv[2], [0, 1], manner))
    threading.Event().wait()


def leave() -> RayExecutor:
    """The program shuts Ray down under an executor: in a call, and while nothing is called."""
    with meeting() as place:
        executor = RayExecutor(Agent, **OPTIONS)
        call = executor.submit_rpc("announced", args=(place.path, [0, 1], "hang_python"))
        place.pids(2)
        ray.shutdown()
        assert isinstance(call.exception(10.0), WorkerDiedError | ExecutorBrokenError)
    check_left(executor)
    executor = forget()
    ray.shutdown()
    check_left(executor)
    return executor


def check_left(executor: RayExecutor) -> None:
    """The executor can do nothing any more, and says so soon; its release is harmless."""
    end = time.monotonic() + 10.0
    while executor.state is not State.BROKEN:  # Ray tells nobody: it is looked at once a second
        assert time.monotonic() < end, executor.describe()
        time.sleep(0.01)
    try:
        executor.collective_rpc("echo", args=(1,))
    except ExecutorBrokenError:
        executor.release()
        say(executor.pids)
    else:
        raise AssertionError("it answers")


def main() -> None:
    # Clusters of others on this machine are not this program's business.
    ray._private.services.find_gcs_addresses = functools.cache(set)
    ending = sys.argv[1]
    if ending == "release":
        kept = release()
        assert kept
    elif ending == "error":
        kept = forget()
        raise KeyError("of the program")
    elif ending == "leave":
        kept = leave()
    else:
        hang(ending)


if __name__ == "__main__":
    main()
