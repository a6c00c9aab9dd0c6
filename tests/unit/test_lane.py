"""The control lane: whole messages and descriptors between two processes, with no wait that has no end."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from mpexec.deadline import Deadline
from mpexec.errors import SerializationError, TransportError
from mpexec.transport.lane import ControlLane, LaneClosed, LaneTimeout, lane_pair

SOON = 10.0


@pytest.fixture
def lanes() -> Iterator[tuple[ControlLane, ControlLane]]:
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = lane_pair()
    other = ControlLane(os.dup(theirs.fd))
    theirs.close()
    yield ours, other
    ours.close()
    other.close()
    del ours, other
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_messages_arrive_whole_and_in_order(lanes: tuple[ControlLane, ControlLane]) -> None:
    ours, other = lanes
    for number in range(5):
        ours.send({"number": number})
    assert [other.recv(Deadline.after(SOON))[0]["number"] for _ in range(5)] == list(range(5))
    assert other.try_recv() is None


def test_descriptors_travel_with_their_message_and_are_not_inheritable(lanes: tuple[ControlLane, ControlLane]) -> None:
    ours, other = lanes
    read_end, write_end = os.pipe()
    ours.send("two ends", [read_end, write_end])
    os.close(read_end)
    os.close(write_end)
    message, fds = other.recv(Deadline.after(SOON))
    assert message == "two ends"
    assert [os.get_inheritable(fd) for fd in fds] == [False, False]
    os.write(fds[1], b"through")
    assert os.read(fds[0], 10) == b"through"
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("nbytes", [32 << 10, 1 << 20, 64 << 20])
def test_a_large_message_takes_descriptors_along_too(lanes: tuple[ControlLane, ControlLane], nbytes: int) -> None:
    ours, other = lanes
    fd = os.open("/proc/self/stat", os.O_RDONLY)
    ours.send(b"x" * nbytes, [fd])
    os.close(fd)
    message, fds = other.recv(Deadline.after(SOON))
    assert len(message) == nbytes
    assert os.read(fds[0], 5)
    os.close(fds[0])


def test_the_peers_end_is_seen_after_its_last_message(lanes: tuple[ControlLane, ControlLane]) -> None:
    ours, other = lanes
    other.send("last")
    other.close()
    assert ours.recv(Deadline.after(SOON))[0] == "last"
    with pytest.raises(LaneClosed):
        ours.recv(Deadline.after(SOON))
    with pytest.raises(LaneClosed):
        ours.send("too late")


def test_last_messages_survive_a_peer_that_died_with_unread_ones(lanes: tuple[ControlLane, ControlLane]) -> None:
    ours, other = lanes
    ours.send("never read")
    other.send("the reason")
    other.close()
    assert ours.recv(Deadline.after(SOON))[0] == "the reason"
    with pytest.raises(LaneClosed):
        ours.recv(Deadline.after(SOON))


def test_a_peer_that_does_not_read_ends_the_send_at_the_deadline(lanes: tuple[ControlLane, ControlLane]) -> None:
    ours, other = lanes
    sent = 0
    with pytest.raises(LaneTimeout) as caught:
        while True:
            ours.send(bytes(30_000), deadline=Deadline.after(0.05))
            sent += 1
    assert isinstance(caught.value, TransportError)
    assert [len(other.recv(Deadline.after(SOON))[0]) for _ in range(sent)] == [30_000] * sent
    ours.send("usable again")
    assert other.recv(Deadline.after(SOON))[0] == "usable again"


def test_a_receiver_without_message_waits_until_the_deadline(lanes: tuple[ControlLane, ControlLane]) -> None:
    with pytest.raises(LaneTimeout):
        lanes[0].recv(Deadline.after(0.01))


def test_what_cannot_be_pickled_is_refused_and_disturbs_nothing(lanes: tuple[ControlLane, ControlLane]) -> None:
    ours, other = lanes
    with pytest.raises(SerializationError, match="control message"):
        ours.send(threading.Lock())
    ours.send("next")
    assert other.recv(Deadline.after(SOON))[0] == "next"


def _raise_here() -> None:
    raise ValueError("not here")


class _Unloadable:
    def __reduce__(self) -> tuple[object, ...]:
        return _raise_here, ()


def test_what_cannot_be_rebuilt_is_reported_and_its_descriptors_are_closed(
    lanes: tuple[ControlLane, ControlLane],
) -> None:
    ours, other = lanes
    ours.send(_Unloadable(), [0])
    ours.send("next")
    with pytest.raises(SerializationError, match="not here"):
        other.recv(Deadline.after(SOON))
    assert other.recv(Deadline.after(SOON))[0] == "next"


def test_many_threads_may_send(lanes: tuple[ControlLane, ControlLane]) -> None:
    ours, other = lanes

    def send_many() -> None:
        for _ in range(50):
            ours.send(bytes(1000))

    threads = [threading.Thread(target=send_many) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert [len(other.recv(Deadline.after(SOON))[0]) for _ in range(400)] == [1000] * 400
    for thread in threads:
        thread.join()


def test_a_closed_lane_says_so_and_touches_no_later_descriptor(lanes: tuple[ControlLane, ControlLane]) -> None:
    ours, _ = lanes
    number = ours.fileno()
    ours.close()
    later = os.open("/dev/null", os.O_RDONLY)
    assert later == number
    ours.close()
    with pytest.raises(LaneClosed):
        ours.try_recv()
    with pytest.raises(LaneClosed):
        ours.send(1)
    del ours
    gc.collect()
    os.fstat(later)
    os.close(later)


def test_a_forked_child_holds_no_end(lanes: tuple[ControlLane, ControlLane]) -> None:
    ours, other = lanes
    ready, hold = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(ready, 1)
        os._exit(0 if ours.closed and other.closed else 1)
    # the child lives, and the peer's end is seen all the same
    other.close()
    with pytest.raises(LaneClosed):
        ours.recv(Deadline.after(SOON))
    os.write(hold, b"x")
    os.close(ready)
    os.close(hold)
    assert os.waitpid(pid, 0)[1] == 0
