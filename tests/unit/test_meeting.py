"""Processes of a launched job that find each other by name: a lane counts once its receiver has proved itself."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mpexec.deadline import Deadline
from mpexec.errors import StartupError
from mpexec.processes.launched import LaunchedJob
from mpexec.processes.meeting import Meeting, _Post, _say_hello, _taken, wait_for_lane

SECONDS = 20.0


@pytest.fixture
def job(tmp_path: Path) -> LaunchedJob:
    return LaunchedJob(rank=0, world_size=2, key=f"{os.getpid()}-{tmp_path.name}")


@contextlib.contextmanager
def process_1(job: LaunchedJob, *, at_its_name: bool) -> Iterator[int]:
    """A process that says hello as process 1 of the job, and waits for its lane only `at_its_name`."""
    end_read, end_write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(end_write)
            if at_its_name:
                lane = wait_for_lane(replace(job, rank=1), Deadline.after(SECONDS))
            else:
                _say_hello(_Post(replace(job, rank=2)), replace(job, rank=1), Deadline.after(SECONDS))
            os.read(end_read, 1)
            if at_its_name:
                lane.close()
        finally:
            os._exit(0)
    os.close(end_read)
    try:
        yield pid
    finally:
        os.close(end_write)
        os.waitpid(pid, 0)


def test_the_process_that_said_hello_and_has_its_lane_is_met(job: LaunchedJob) -> None:
    with Meeting(job, first_rank=1) as meeting, process_1(job, at_its_name=True) as pid:
        assert meeting.wait(Deadline.after(SECONDS))
        process, death_end = meeting.take(1)
        assert (process.rank, process.pid) == (1, pid)
        process.lane.hang_up()
        process.close()
        death_end.close()


def test_a_lane_that_another_process_got_hold_of_is_never_spoken_over(job: LaunchedJob) -> None:
    lanes = []

    def steal() -> None:
        """Wait for the lane at the name of process 1, and say that we have it."""
        while not lanes and select.select([name.sock], [], [], SECONDS)[0]:
            letter = name.receive()
            if letter is not None and letter.fds:
                lanes.append(_taken(letter.fds[0]))

    thief = threading.Thread(target=steal)
    with (
        contextlib.closing(_Post(replace(job, rank=1))) as name,
        Meeting(job, first_rank=1) as meeting,
        process_1(job, at_its_name=False),
    ):
        thief.start()
        with pytest.raises(StartupError, match=r"process 1 of the job \(of 2\) did not call MPExecutor\.attach"):
            meeting.wait(Deadline.after(0.5))
        thief.join(SECONDS)
        (lane,) = lanes
        assert not select.select([lane], [], [], 0)[0], "something was sent over it"
        lane.close()
