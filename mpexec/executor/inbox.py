"""Whoever waits, drains: threads, event loops and, where nobody waits, the monitor thread.

All of them call `pump`, which reads every reply ring and hands out what belongs to others. What differs is who sleeps
where. A word in shared memory tells the ranks which of three doorbells to ring after a reply:

    THREAD    one blocked thread, the leader; other blocked threads wait at gates that the pump opens
    LOOP      event loops with a waiter
    MONITOR   calls that nobody waits for

While somebody spins, the word is 0: a reply then costs the ranks no system call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from mpexec.deadline import Deadline
from mpexec.errors import TransportError
from mpexec.executor.outbox import Outbox
from mpexec.executor.pending import PendingCall, open_gate
from mpexec.transport import linux
from mpexec.transport.channel import Receiver
from mpexec.transport.doorbell import CONTENDED_NS, WALL_NS, YIELDS, Spinner
from mpexec.transport.ring import DRIVER_PARKED, Record
from mpexec.transport.segment import Segment

logger = logging.getLogger(__name__)

THREAD, LOOP, MONITOR = 1, 2, 4
_TURN_NS = 200_000


class Waitable(Protocol):
    """What can be waited for: a call, or an output."""

    done: bool
    waited: int

    def watch(self, changed: Callable[[], None]) -> None:
        """Ask to be told of changes."""

    def unwatch(self, changed: Callable[[], None]) -> None:
        """Undo `watch`."""

    def next_expiry(self) -> int | None:
        """Monotonic ns of the next moment at which time alone changes something."""


class Handlers(Protocol):
    """What the inbox asks of its executor; called with the pump held, except `expire`."""

    def on_record(self, rank: int, receiver: Receiver, record: Record) -> None:
        """One record of a rank."""

    def on_corrupt(self, rank: int, error: TransportError) -> None:
        """A rank's ring is not what it must be."""

    def expire(self, waiting: Waitable) -> None:
        """Time has changed something for a waiting call; may take a while."""


class Inbox:
    """The replies of all ranks, and everybody who waits for them.

    Args:
        board: The call ring's segment, whose header holds the parked word.
        receivers: The reading ends of the reply rings, index = rank.
        outbox: Whose backlog is flushed whenever replies are drained.
        handlers: The executor's side, referred to weakly: a forgotten executor is released.
    """

    def __init__(self, board: Segment, receivers: list[Receiver], outbox: Outbox, handlers: Handlers) -> None:
        self.bells = [linux.OwnedFd(linux.eventfd()) for _ in range(3)]
        self._words = board.words
        self._outbox = outbox
        self._rings = [(rank, receiver, receiver.ring, receiver.ring.words) for rank, receiver in enumerate(receivers)]
        self._handlers = weakref.ref(handlers)
        # Re-entrant, because a signal handler of the user's may run, and stop the executor, while its thread has one.
        self._pump_lock = threading.RLock()
        self._pumper = 0
        self._park_lock = threading.RLock()
        self._events: deque[Callable[[], None]] = deque()
        self._leader: int | None = None
        self._leader_parked = False
        self._polling = False
        self._followers: deque[tuple[int, threading.Lock]] = deque()
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        self._probing: list[asyncio.AbstractEventLoop] = []
        self._mask = 0
        self._unwaited = 0
        self._covered = 0
        self._spinner = Spinner()
        self._turned_ns = 0
        self._closed = False

    @property
    def waits(self) -> tuple[int, int]:
        """How many waits ended while somebody was spinning, and how many in sleep."""
        return self._spinner.hits, self._spinner.parks

    # -- draining ------------------------------------------------------------------------------------------------

    def has_news(self) -> bool:
        """True if `pump` has something to do."""
        for _, _, ring, words in self._rings:
            if words[0] != ring.tail:
                return True
        return bool(self._events)

    def pump(self) -> None:
        """Read all reply rings, apply events, hand out. Any thread; never waits for a process."""
        me = threading.get_ident()
        if self._pumper == me:  # a handler has posted an event: it comes after the record that is being handled
            return
        with self._pump_lock:
            handlers = self._handlers()
            if self._closed or self._pumper or handlers is None:
                return
            self._pumper = me
            try:
                self._pump(handlers)
            finally:
                self._pumper = 0
        if self._events and not self._closed:  # of a signal handler that ran when the last look was over
            self.pump()
            return
        if self._leader_parked and (self._leader != me or self._polling):
            self.kick()

    def _pump(self, handlers: Handlers) -> None:
        on_record = handlers.on_record
        for rank, receiver, ring, words in self._rings:
            try:
                while words[0] != ring.tail and (record := ring.read()) is not None:
                    on_record(rank, receiver, record)
                    ring.advance()
                    if ring.busy and ring.writer_wants_space():
                        self._outbox.wake_rank(rank)
            except TransportError as error:
                handlers.on_corrupt(rank, error)
        if self._outbox.has_backlog:
            self._outbox.flush()
        while self._events:
            self._events.popleft()()

    def post(self, event: Callable[[], None]) -> None:
        """Have `event` run inside the pump: now, or, from inside the pump, after what it is at."""
        self._events.append(event)
        self.pump()

    def kick(self) -> None:
        """Wake the leader: another thread, or a signal handler during its own sleep, may have ended its call."""
        if not self.bells[0].closed:
            linux.ring_eventfd(self.bells[0].fd)

    # -- the parked word -----------------------------------------------------------------------------------------

    def _publish(self) -> int:
        """Write down who must be woken; with the park lock held. The caller fences and looks again if it is not 0."""
        if self._closed:  # a thread whose call has ended may come by later than the release, which takes the memory
            return 0
        if self._leader is not None:
            mask = THREAD if self._leader_parked else 0
        elif self._loops or self._probing:
            # A loop that probes looks by itself as soon as it gets a turn; its other waiters could not run before.
            awake = [loop for loop in self._probing if loop.is_running()]
            asleep = [loop for loop in self._loops if loop.is_running() and loop not in awake]
            mask = LOOP if asleep else 0
            if self._unwaited or (self._covered and not (awake or asleep)):
                mask |= MONITOR
        else:
            mask = MONITOR if self._unwaited or self._covered else 0
        if mask != self._mask:
            self._mask = self._words[DRIVER_PARKED] = mask
        return mask

    def _republish(self) -> None:
        with self._park_lock:
            if self._closed:
                return
            mask = self._publish()
        if mask:
            linux.fence()
            if self.has_news():
                self.pump()

    def count_unwaited(self, change: int, *, covered: bool = False) -> None:
        """Note how many calls in flight nobody waits for; `covered` ones are drained by any loop that waits."""
        with self._park_lock:
            if covered:
                self._covered += change
            else:
                self._unwaited += change
        if change > 0:
            self._republish()

    def on_monitor_bell(self) -> None:
        """The monitor thread's callback for its doorbell."""
        linux.drain_eventfd(self.bells[2].fd)
        self.pump()

    # -- threads ---------------------------------------------------------------------------------------------------

    def wait(self, pending: PendingCall) -> None:
        """Block this thread until the call is over."""
        me = threading.get_ident()
        try:
            while not pending.done:
                if self.claim(me):
                    self._lead(pending)
                else:
                    self._follow(pending, me)
        finally:
            self.let_go(me)

    def let_go(self, me: int) -> None:
        """Give the lead to the next if thread `me` has it. A Ctrl-C in the midst of it must not leave it nowhere."""
        if self._leader != me:
            return
        if not self._mask and not (self._loops or self._probing or self._unwaited or self._covered):
            # The frequent case: nobody but this thread waits. Who joins the followers after this look sees no leader.
            self._leader = None
            if not self._followers:
                return
            self._leader = me
        interrupted: KeyboardInterrupt | None = None
        heir: tuple[int, threading.Lock] | None = None
        while self._leader == me or heir is not None:
            try:
                if self._leader == me:
                    heir = self._choose_heir()
                if heir is not None:
                    open_gate(heir[1])
                break
            except KeyboardInterrupt as again:
                interrupted = again
        if self._mask:
            linux.fence()
            with self._park_lock:
                news = not self._closed and self.has_news()
            if news:
                self.pump()
        if interrupted is not None:
            raise interrupted

    def claim(self, me: int) -> bool:
        """Make thread `me` the leader if there is none. It must `wait`, or `let_go`, next."""
        if self._leader == me:
            return True
        with self._park_lock:
            if self._leader is not None and self._leader != me:
                return False
            self._leader = me
            if self._mask:
                self._publish()
        return True

    def _lead(self, pending: PendingCall) -> None:
        spinner = self._spinner
        if spinner.spin(partial(self._look, pending)):
            return
        spinner.parks += 1
        try:
            self._leader_parked = True
            self._republish()
            began = time.monotonic_ns()
            while not pending.done:
                self._sleep(pending)
            spinner.woke_after(time.monotonic_ns() - began)
        finally:
            self._leader_parked = False

    def _look(self, pending: PendingCall) -> bool:
        """Drain if every rank that is missing has sent something, or others wait too; true if the call is over."""
        if not (self._followers or self._events or pending.failed):
            rings, values = self._rings, pending.values
            for rank in pending.ranks:
                if rank not in values:
                    _, _, ring, words = rings[rank]
                    if words[0] == ring.tail:
                        return pending.done
        self.pump()
        return pending.done

    def _sleep(self, pending: PendingCall) -> None:
        bell = self.bells[0].fd
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        expiry = pending.next_expiry()
        self._polling = True
        try:
            if not pending.done:
                poll.poll(Deadline(expiry).poll_ms())
        finally:
            self._polling = False
        if pending.done:  # by another thread, and the executor may have been released since: the bell is no longer ours
            return
        linux.drain_eventfd(bell)
        self.pump()
        if not pending.done and expiry is not None and time.monotonic_ns() >= expiry:
            self._expire(pending)

    def _expire(self, waiting: Waitable) -> None:
        handlers = self._handlers()
        if handlers is not None:
            handlers.expire(waiting)

    def _follow(self, pending: PendingCall, me: int) -> None:
        gate = threading.Lock()
        gate.acquire()
        entry = (me, gate)
        self._followers.append(entry)
        pending.gate = gate
        try:
            # Look once more: the last leader may have left, or ended this call, before it could see us.
            if pending.done or self._leader is None or self._leader == me:
                return
            expiry = pending.next_expiry()
            left = -1.0 if expiry is None else max(0.0, (expiry - time.monotonic_ns()) / 1e9)
            if not gate.acquire(timeout=left) and not pending.done:
                self._expire(pending)
        finally:
            pending.gate = None
            if entry in self._followers:
                self._followers.remove(entry)

    def _choose_heir(self) -> tuple[int, threading.Lock] | None:
        """Make the follower that waits longest the leader, by name, so that a busy caller cannot starve it."""
        with self._park_lock:
            heir = self._followers[0] if self._followers else None
            self._leader = None if heir is None else heir[0]
            self._publish()
        return heir

    # -- event loops -------------------------------------------------------------------------------------------------

    async def wait_async(self, waiting: Waitable) -> None:
        """Wait on the running loop until the call or output has come. The loop gets its turns meanwhile."""
        if waiting.done or await self._probe(waiting):
            return
        self._spinner.parks += 1
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def changed() -> None:
            if _running_loop() is loop:
                woken.set()
            else:
                _call_soon(loop, woken.set)

        waiting.waited += 1
        waiting.watch(changed)
        self._attach(loop)
        try:
            while not waiting.done:
                await self._sleep_async(loop, waiting, woken)
        finally:
            waiting.waited -= 1
            waiting.unwatch(changed)
            self._detach(loop)

    async def _sleep_async(self, loop: asyncio.AbstractEventLoop, waiting: Waitable, woken: asyncio.Event) -> None:
        woken.clear()
        expiry = waiting.next_expiry()
        timer = None
        if expiry is not None:
            timer = loop.call_later(max(0.0, (expiry - time.monotonic_ns()) / 1e9), woken.set)
        try:
            await woken.wait()
        finally:
            if timer is not None:
                timer.cancel()
        if not waiting.done and expiry is not None and time.monotonic_ns() >= expiry:
            await self._expire_async(waiting, woken)

    async def _expire_async(self, waiting: Waitable, woken: asyncio.Event) -> None:
        """Collecting stacks takes a while, so it runs beside the loop; a change of the call ends the wait for it."""
        woken.clear()
        loop = asyncio.get_running_loop()

        def body() -> None:
            self._expire(waiting)
            _call_soon(loop, woken.set)

        threading.Thread(target=body, name="mpexec-expire", daemon=True).start()
        await woken.wait()

    async def _probe(self, waiting: Waitable) -> bool:
        """Spin without starving anybody: each look gives the core to the ranks and a turn to the loop's other tasks."""
        if not self._spinner.wants_to_spin():
            return False
        loop = asyncio.get_running_loop()
        with self._park_lock:
            self._probing.append(loop)
            self._publish()
        try:
            return await self._look_and_turn(waiting)
        finally:
            with self._park_lock:
                self._probing.remove(loop)
            self._republish()

    async def _look_and_turn(self, waiting: Waitable) -> bool:
        spinner = self._spinner
        last = time.monotonic_ns()
        end = last + WALL_NS
        for _ in range(YIELDS):
            os.sched_yield()
            now = time.monotonic_ns()
            if self.has_news():
                self.pump()
            if now - last > CONTENDED_NS:
                spinner.contended()
                break
            if waiting.done:
                spinner.hit()
                break
            await asyncio.sleep(0)
            last = self._turned_ns = time.monotonic_ns()
            if now > end:
                spinner.missed()
                break
        else:
            spinner.missed()
        if now - self._turned_ns > _TURN_NS:  # replies that are always there at the first look must not starve the loop
            await asyncio.sleep(0)
            self._turned_ns = time.monotonic_ns()
        return waiting.done

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._park_lock:
            count = self._loops.get(loop, 0)
            self._loops[loop] = count + 1
            if not count:
                loop.add_reader(self.bells[1].fd, self._on_loop_bell)
        self._republish()
        if self.has_news():
            self.pump()

    def _detach(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._park_lock:
            count = self._loops.get(loop, 0) - 1
            if count > 0:
                self._loops[loop] = count
            elif count == 0:
                del self._loops[loop]
                if not (self.bells[1].closed or loop.is_closed()):
                    loop.remove_reader(self.bells[1].fd)
        self._republish()

    def _on_loop_bell(self) -> None:
        linux.drain_eventfd(self.bells[1].fd)
        self.pump()

    def close(self) -> None:
        """Stop watching and close the doorbells. Every call has been ended; each loop removes its watch itself."""
        # A forgotten executor may be collected in the midst of its own pump; then this thread has the lock already.
        pump_lock = contextlib.nullcontext() if self._pumper == threading.get_ident() else self._pump_lock
        with pump_lock, self._park_lock:
            self._closed = True
            loops = list(self._loops)
            self._loops.clear()
        for loop in loops:
            self._remove_from(loop)
        for bell in self.bells:
            bell.close()

    def _remove_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take our doorbell out of a loop before its number is closed; on that loop's own thread where it runs."""
        fd = self.bells[1].fd
        if not loop.is_running() or loop is _running_loop():
            if not loop.is_closed():
                loop.remove_reader(fd)
            return
        removed = threading.Event()

        def remove() -> None:
            loop.remove_reader(fd)
            removed.set()

        if _call_soon(loop, remove):
            removed.wait(1.0)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> bool:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the loop is closed; its waiters are gone with it
        logger.debug("a loop that had waited is closed")
        return False
    return True
