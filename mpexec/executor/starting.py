"""What the ranks of an executor report until all of them are ready, whatever started them."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.deadline import Deadline
from mpexec.errors import StartupError, WorkerDiedError, attach_others
from mpexec.executor.pending import first_line
from mpexec.messages import Failure, Ready
from mpexec.processes import Death

logger = logging.getLogger(__name__)

_SETTLE_S = 1.0  # after a start has failed: news that may name the root cause


class StartAbort:
    """Ends the start of a group from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = False
        self._tell: Callable[[], None] | None = None

    def attach(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when the start is to end, at once if that has been asked already."""
        with self._lock:
            self._tell = tell
            asked = self._asked
        if asked:
            tell()

    def ask(self) -> None:
        """End the start, now or when it begins; one that is over is not touched."""
        with self._lock:
            self._asked = True
            tell = self._tell
        if tell is not None:
            tell()


class StartWatch:
    """Collects the news of a start, and tells its end.

    Args:
        spec: What the ranks run.
        abort: Ends the start from another thread.
    """

    def __init__(self, spec: WorkerSpec, abort: StartAbort | None) -> None:
        self.spec = spec
        self._queue: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._on_message: Callable[[int, tuple[Any, ...]], None] | None = None
        self._on_death: Callable[[Death], None] | None = None
        if abort is not None:
            abort.attach(lambda: self._queue.put(("abort", -1, None)))

    def pass_on(self, kind: str, rank: int, news: Any) -> None:
        """Give news of a rank, a "message" or its "death", to the start, or after `attach` to the executor."""
        with self._lock:  # `attach` takes what came before it, and nothing falls between
            if self._on_message is None or self._on_death is None:
                self.put(kind, rank, news)
                return
            on_message, on_death = self._on_message, self._on_death
        if kind == "death":
            on_death(news)
        else:
            on_message(rank, news)

    def attach(self, on_message: Callable[[int, tuple[Any, ...]], None], on_death: Callable[[Death], None]) -> None:
        """The start is over: news goes to the executor from now on, what has come meanwhile first."""
        with self._lock:
            self._on_message, self._on_death = on_message, on_death
            rest = self._rest()
        for kind, rank, news in rest:
            if kind == "death":
                on_death(news)
            elif kind == "message":
                on_message(rank, news)

    def put(self, kind: str, rank: int, news: Any) -> None:
        """Add news of a rank: a "message" (a tuple), its "death", or an "answer" to a question of the starter."""
        self._queue.put((kind, rank, news))

    def next(self, deadline: Deadline) -> tuple[str, int, Any]:
        """The next news.

        Raises:
            queue.Empty: None came until the deadline.
            StartupError: The start is to end.
        """
        kind, rank, news = self._queue.get(timeout=deadline.remaining())
        if kind == "abort":
            raise StartupError("the start was cancelled by its caller", phase="start")
        return kind, rank, news

    def _rest(self) -> list[tuple[str, int, Any]]:
        left = []
        with contextlib.suppress(queue.Empty):
            while True:
                left.append(self._queue.get_nowait())
        return left

    def await_ready(self) -> list[Ready]:
        """Wait until every rank is ready; what each reported, index = rank. On a failure the caller ends them.

        Raises:
            StartupError: With the first failing rank's error as cause; `init_timeout` counts from the last progress.
        """
        ready: dict[int, Ready] = {}
        phases = dict.fromkeys(self.spec.topology.ranks, "spawn")
        clocks = dict.fromkeys(phases, Deadline.after(self.spec.init_timeout))
        while len(ready) < self.spec.world_size:
            waiting = [rank for rank in phases if rank not in ready]
            late = min(waiting, key=lambda rank: clocks[rank].at_ns or 0)
            try:
                kind, rank, news = self.next(clocks[late])
            except queue.Empty:
                raise self._startup_timeout(late, waiting, phases) from None
            if kind == "death" or news[0] == "failed":
                raise self._startup_failure(kind, rank, news, phases)
            clocks[rank] = Deadline.after(self.spec.init_timeout)
            if news[0] == "ready":
                ready[rank] = news[1]
            else:
                phases[rank] = news[1]
                logger.info("rank %d: %s", rank, news[1])
        return [ready[rank] for rank in sorted(ready)]

    def _startup_timeout(self, late: int, waiting: list[int], phases: dict[int, str]) -> StartupError:
        states = ", ".join(f"rank {rank} in phase {phases[rank]!r}" for rank in waiting)
        return StartupError(
            f"no progress for {self.spec.init_timeout:g} s (init_timeout): {states}. "
            "A build_model that takes longer may call report_progress, or give a longer init_timeout.",
            rank=late,
            phase=phases[late],
        )

    def _startup_failure(self, kind: str, rank: int, news: Any, phases: dict[int, str]) -> StartupError:
        """Name the root cause: news that comes within a moment of the first may come before it in rank."""
        first = [(kind, rank, news)]
        settle = Deadline.after(_SETTLE_S)
        while not _tells_root_cause(*first[-1]):
            try:
                item = self._queue.get(timeout=settle.remaining())
            except queue.Empty:
                break
            if item[0] == "abort":
                break
            if item[0] == "death" or item[2][0] == "failed":
                first.append(item)
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item[0] == "death" or (item[0] != "abort" and item[2][0] == "failed"):
                    first.append(item)
        errors = [
            self._error_of(*item, phases) for item in sorted(first, key=lambda item: not _tells_root_cause(*item))
        ]
        root = errors[0]
        attach_others(root, [error for error in errors[1:] if error.rank != root.rank])
        return root

    def _error_of(self, kind: str, rank: int, news: Any, phases: dict[int, str]) -> StartupError:
        if kind == "death":
            phase = phases[rank]
            cause: BaseException = died_error(news, phase)
            text = f"rank {rank} (pid {news.pid}) {news.describe()} in phase {phase!r}"
            return _with_cause(StartupError(text + _tail(news.last_lines), rank=rank, phase=phase), cause)
        _, phase, failure = news
        assert isinstance(failure, Failure)
        cause = failure.to_exception()
        text = f"rank {rank} failed in phase {phase!r}: {failure.type_name}: {failure.text}"
        return _with_cause(StartupError(text, rank=rank, phase=phase), cause)


def died_error(death: Death, method: str | None, states: str = "") -> WorkerDiedError:
    """The error for a rank whose process has ended; `states`, what all ranks were at, becomes a note."""
    where = f" in {method!r}" if method else " outside any call"
    error = WorkerDiedError(
        f"rank {death.rank} (pid {death.pid}) {death.describe()}{where}{_tail(death.last_lines)}",
        rank=death.rank,
        pid=death.pid,
        exit_code=death.exit_code,
        signal_name=death.signal_name,
        method=method,
        last_lines=death.last_lines,
        node=death.node,
        reason=death.reason,
    )
    if states:
        error.add_note(f"all ranks: {states}")
    return error


def lost_at_start(root: BaseException | None) -> StartupError:
    """The error for a rank that was lost in the moment after all had become ready, with `root` as its cause."""
    assert root is not None
    error = StartupError(f"a rank was lost when all had become ready: {first_line(root)}", phase="ready")
    error.rank = getattr(root, "rank", None)
    error.__cause__ = root
    return error


def _tail(lines: tuple[str, ...], most: int = 10) -> str:
    if not lines:
        return ""
    return "\nIts last lines:\n" + "\n".join(f"  {line}" for line in lines[-most:])


def _with_cause(error: StartupError, cause: BaseException) -> StartupError:
    error.__cause__ = cause
    return error


def _tells_root_cause(kind: str, rank: int, news: Any) -> bool:
    """False for what looks like a consequence of another rank's end."""
    if kind == "death":
        return not news.sent_by_us and not (news.exit_code == 1 and not news.last_lines)
    return not news[2].lost_peer
