"""Running one call on one worker: sync methods to their end in call order, coroutines as tasks that may overlap.

Both kinds of executor use it, so that a call means the same in a rank and in the driver's own process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import CoroutineType
from typing import Any

from mpexec.messages import Call
from mpexec.tasks import AnyTask, cancel_async_tasks
from mpexec.worker.base_worker import BaseWorker

Report = Callable[[Call, Any, BaseException | None], None]


class Dispatcher:
    """Runs calls on one worker and reports how each ended.

    Args:
        worker: The worker.
        report: Called once a call as `report(call, value, error)`, on the loop's thread, except for cancelled calls
            and, with `exits_pass`, for `SystemExit` and `KeyboardInterrupt`.
        note: Called as `note(name, ns)` once a coroutine has been reported, with the time since its start. That of a
            sync method is for whoever calls `run` to know.
        exits_pass: `SystemExit` and `KeyboardInterrupt` end this process; otherwise they are failures of their call.
    """

    def __init__(
        self, worker: BaseWorker, report: Report, note: Callable[[str, int], None], *, exits_pass: bool
    ) -> None:
        self._worker = worker
        self._report = report
        self._note = note
        self._passing: tuple[type[BaseException], ...] = (SystemExit, KeyboardInterrupt) if exits_pass else ()
        self._running: dict[int, tuple[Call, AnyTask]] = {}

    def run(self, call: Call) -> bool:
        """Run a sync method to its end, or start a coroutine; in the order in which this is called.

        Returns:
            True if a coroutine was started. Its first step is the loop's next: let it come before the next call.
        """
        _, method, args, kwargs, _ = call
        try:
            if type(method) is str:
                result = self._worker.find(method)(*args, **kwargs)
            else:
                result = method(self._worker, *args, **kwargs)  # type: ignore[operator]
        except self._passing:
            raise
        except BaseException as error:  # also what is no Exception: every call is answered
            self._report(call, None, error)
            return False
        if type(result) is CoroutineType:
            self._start(call, result)
            return True
        self._report(call, result, None)
        return False

    def _start(self, call: Call, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"call {call.call_id} {call.name}")
        self._running[call.call_id] = (call, task)
        since = time.monotonic_ns()
        task.add_done_callback(lambda done: self._ended(call, done, since))

    def _ended(self, call: Call, task: AnyTask, since: int) -> None:
        abandoned = self._running.pop(call.call_id, None) is None
        if task.cancelled():
            if not abandoned:
                cancelled = asyncio.CancelledError(f"the coroutine of {call.name!r} was cancelled on the rank")
                self._report(call, None, cancelled)
            return
        error = task.exception()
        if abandoned or isinstance(error, self._passing):
            return
        self._report(call, None if error is not None else task.result(), error)
        self._note(call.name, time.monotonic_ns() - since)

    def cancel(self, call_id: int) -> None:
        """Cancel the coroutine of an abandoned call; nothing more is reported of it. Unknown ids are ignored."""
        running = self._running.pop(call_id, None)
        if running is not None:
            running[1].cancel()

    async def await_method(self, method: str, seconds: float) -> None:
        """Wait until the running coroutines of one method have returned and been reported, `seconds` at most."""
        tasks = [task for call, task in self._running.values() if call.method == method]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
            await asyncio.sleep(0)  # the report is a callback of the task, one turn later

    async def cancel_all(self) -> None:
        """Cancel every running coroutine and wait until they are gone; nothing more is reported of them."""
        tasks = [task for _, task in self._running.values()]
        self._running.clear()
        await cancel_async_tasks(tasks, timeout=2.0)
