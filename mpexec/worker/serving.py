"""What a rank does all day: read calls, run them in order, answer every one of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any

from mpexec.errors import SerializationError
from mpexec.messages import NOBODY_WAITS, Call, Failure
from mpexec.transport import linux
from mpexec.transport.channel import (
    CALL,
    CANCEL,
    DONE,
    FAILED,
    NOTHING,
    OUTPUT,
    PLAIN_CALL,
    PLAIN_DONE,
    Parcel,
    Receiver,
    Sender,
)
from mpexec.transport.doorbell import Spinner
from mpexec.transport.durations import SHORT_NS, Durations
from mpexec.transport.frame import PLAIN, dump_plain, dumps, encode, load_plain
from mpexec.transport.ring import (
    DRIVER_PARKED,
    FORWARD_SINCE,
    PARKS,
    PROGRESS_CALL,
    PROGRESS_SINCE,
    SPIN_HITS,
    WANT_SPACE,
    Record,
)
from mpexec.worker.base_worker import BaseWorker
from mpexec.worker.dispatch import Dispatcher

logger = logging.getLogger(__name__)

_make_call: Any = tuple.__new__  # a named tuple's own `__new__` is a Python function, and takes twice as long
_TURN_NS = 200_000  # calls are read for at most this long before the loop's tasks get a turn


class RankServer:
    """Serves one rank's calls on its event loop.

    While replies wait for room in the reply ring, no further call is read: a driver that does not drain is not
    answered faster than it listens, and nothing can deadlock, because the driver drains whenever it waits.

    Args:
        rank: This rank.
        calls: The reading end of the call ring.
        replies: The writing end of this rank's reply ring.
        driver_bells: The driver's doorbells, in the order of the bits of its parked word.
        durations: Where it notes how long methods take.

    Attributes:
        spinner: That of the selector that asks this server for news; its counts are published.
    """

    def __init__(
        self, rank: int, calls: Receiver, replies: Sender, driver_bells: tuple[int, ...], durations: Durations
    ) -> None:
        self._rank = rank
        self._calls = calls
        self._call_ring = calls.ring
        self._replies = replies
        self._bells = driver_bells
        self._reply_ring = replies.ring
        self._inline = replies.inline
        self._progress = replies.ring.words
        self._driver_words = calls.ring.words
        self._unsent: deque[tuple[int, int, Parcel]] = deque()
        self._dispatcher: Dispatcher | None = None
        self._trimmer: asyncio.TimerHandle | None = None
        self.worker: BaseWorker | None = None
        self.drop_until = 0
        self.spinner: Spinner | None = None
        self._durations = durations
        self._note = durations.add
        self._short = durations.short

    def serve(self, worker: BaseWorker) -> None:
        """Begin to answer for `worker`; on the thread that will run the loop."""
        self.worker = worker
        worker.on_forward = self._on_forward
        self._dispatcher = Dispatcher(worker, self._report, self._note, exits_pass=True)
        self._run_call = self._dispatcher.run

    def has_news(self) -> bool:
        """True if `serve_calls` has something to do; unsent replies count only once there is room for them."""
        if self._unsent:
            return self._flush_would_work()
        return self._driver_words[0] != self._call_ring.tail

    def park(self, parked: bool) -> None:
        """Publish whether the driver must ring this rank's doorbell."""
        self._call_ring.park(1 if parked else 0)
        if not parked:
            return
        if self._short:
            self._durations.publish_short()
        if self.spinner is not None:
            self._progress[SPIN_HITS] = self.spinner.hits
            self._progress[PARKS] = self.spinner.parks

    def _on_forward(self, begins: bool) -> None:
        """The agent's forward hook begins, or has ended."""
        now, words = time.monotonic_ns(), self._progress
        if not begins:
            self._note("forward", now - words[FORWARD_SINCE])
        words[FORWARD_SINCE] = now if begins else 0

    def _flush_would_work(self) -> bool:
        self._progress[WANT_SPACE] = 1
        linux.fence()
        ring = self._replies.ring
        return ring.backlog <= ring.capacity // 2

    def serve_calls(self) -> None:
        """Read and run calls until there is none, a reply has to wait, or the loop deserves a turn.

        Raises:
            TransportError: The call ring is not what it must be; this rank must not go on.
        """
        if self._unsent and not self._flush():
            return
        ring = self._call_ring
        progress = self._progress
        note, short = self._note, self._short
        end = 0
        while not self._unsent and (record := ring.read()) is not None:
            if record.kind == PLAIN_CALL and record.call_id > self.drop_until:
                call = _make_call(Call, (record.call_id,) + load_plain(record.payload))
            else:
                call = self._open(record)
            ring.advance()
            if ring.busy and ring.writer_wants_space():
                self._ring_driver()
            if call is not None:
                progress[PROGRESS_SINCE] = since = time.monotonic_ns()
                progress[PROGRESS_CALL] = call[0]
                started = self._run_call(call)
                progress[PROGRESS_CALL] = 0
                if started:  # its first step comes before the next call, so that calls start in order
                    return
                now = time.monotonic_ns()  # the reply is out: this costs the caller nothing
                method = call[1] if type(call[1]) is str else call.name
                if now - since < SHORT_NS:
                    short[method] += 1
                else:
                    note(method, now - since)
            else:
                now = time.monotonic_ns()
            if self._driver_words[0] == ring.tail:
                return
            end = end or now + _TURN_NS
            if now > end:
                return

    def _open(self, record: Record) -> Call | None:
        """The call of a record if this rank is to run it; a call that cannot be rebuilt is answered here."""
        call_id = record.call_id
        if record.ranks is not None and self._rank not in record.ranks:
            return None
        if record.kind == CANCEL and self._dispatcher is not None:
            self._dispatcher.cancel(call_id)
        if record.kind not in (CALL, PLAIN_CALL):
            return None
        # A call that is dropped is not run, but answered: whoever still counts on this rank hears of it.
        if record.kind == PLAIN_CALL or call_id <= self.drop_until:
            self._calls.forget(record)
            self._send(DONE, call_id, NOTHING)
            return None
        try:
            return Call(call_id, *self._calls.open(record))
        except Exception as error:  # unpickling runs user code, and a class may be missing here
            self._fail(call_id, "unpickling the arguments", error)
            return None

    def _report(self, call: Call, value: Any, error: BaseException | None) -> None:
        if error is not None:
            self._fail(call.call_id, call.name, error)
            return
        call_id, _, _, _, reply_ranks = call
        if reply_ranks is not None and self._rank not in reply_ranks:
            value = None
        payload = dump_plain(value, self._inline) if type(value) in PLAIN else None
        if payload is None:
            self._send_value(call, value)
        elif self._unsent or not self._reply_ring.try_write(PLAIN_DONE, call_id, payload):
            self._send(PLAIN_DONE, call_id, Parcel(payload, (), 0))
        elif reply_ranks != NOBODY_WAITS:
            self._ring_driver()

    def _send_value(self, call: Call, value: Any) -> None:
        what = f"the value that rank {self._rank} returned from {call.name!r}"
        try:
            parcel = self._replies.pack(encode(value, what), (0,))
        except Exception as failed:  # whatever it is, the call is answered
            if isinstance(failed, SerializationError):
                failed.rank = self._rank
            self._fail(call.call_id, call.name, failed)
        else:
            self._send(DONE, call.call_id, parcel)

    def _fail(self, call_id: int, method: str, error: BaseException) -> None:
        failure = Failure.of(error, call_id=call_id, rank=self._rank, method=method, dumps=dumps)
        self._send(FAILED, call_id, self._replies.pack(encode(failure, "a failure"), (0,)))

    def put_output(self, value: Any) -> None:
        """Push one output to the driver; an output that cannot be pickled is sent as that failure."""
        try:
            parcel = self._replies.pack(encode(value, "an output"), (0,))
        except Exception as error:  # whatever it is, the driver hears of it
            if isinstance(error, SerializationError):
                error.rank = self._rank
            failure = Failure.of(error, call_id=0, rank=self._rank, method="forward", dumps=dumps)
            parcel = self._replies.pack(encode(failure, "a failure"), (0,))
        self._send(OUTPUT, 0, parcel)

    def _plan_trim(self) -> None:
        """Give pool memory back once it was unused for a minute; one timer at a time."""
        due = self._replies.pool.next_trim()
        if due is None:
            self._trimmer = None
            return
        seconds = max(1.0, (due - time.monotonic_ns()) / 1e9)
        self._trimmer = asyncio.get_running_loop().call_later(seconds, self._trim)

    def _trim(self) -> None:
        self._replies.pool.trim()
        self._plan_trim()

    def _send(self, kind: int, call_id: int, parcel: Parcel) -> None:
        if parcel.buffers and self._trimmer is None:
            self._plan_trim()
        if self._unsent or not self._replies.try_send(kind, call_id, parcel):
            self._unsent.append((kind, call_id, parcel))
        self._ring_driver()

    def _flush(self) -> bool:
        while self._unsent:
            if not self._replies.try_send(*self._unsent[0]):
                self._ring_driver()
                return False
            self._unsent.popleft()
            self._ring_driver()
        self._progress[WANT_SPACE] = 0
        return True

    def _ring_driver(self) -> None:
        """Wake whoever waits in the driver. The fence orders the reply before the look at the parked word."""
        linux.fence()
        mask = self._driver_words[DRIVER_PARKED]
        if mask:
            for bit, bell in enumerate(self._bells):
                if mask >> bit & 1:
                    linux.ring_eventfd(bell)

    async def stop(self) -> None:
        """Cancel the coroutines of calls and the worker's background tasks, and wait until they are gone."""
        assert self._dispatcher is not None
        assert self.worker is not None
        await self.worker.stop_async()
        self._unsent = deque(item for item in self._unsent if item[0] != OUTPUT)
        await self._dispatcher.await_method("wait_tasks", 1.0)  # it returns now that its tasks have ended
        await self._dispatcher.cancel_all()

    def progress(self) -> dict[str, Any]:
        """What this rank is at, for a ping: the call it is in (0: none)."""
        return {"call_id": self._progress[PROGRESS_CALL]}
