"""Behind the fixture `mp_executor`: executors that are released whatever the test does."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.deadline import Deadline
from mpexec.errors import StartupError
from mpexec.executor.base import make_spec
from mpexec.executor.mp import MPExecutor
from mpexec.messages import NOBODY_WAITS
from mpexec.pytest_plugin.faults import Faults, bad_point

logger = logging.getLogger(__name__)

_NOTIFIED_S = 1.0  # for the calls by `notify` of one executor that are on their way when the test ends


class ExecutorFactory:
    """Makes executors, and releases all of them in the end, the last one first.

    Args:
        options: Options of every executor, unless the call gives others.
        faults: The test's faults, if it has any.
    """

    def __init__(self, options: Mapping[str, Any], faults: Faults | None) -> None:
        self._options = dict(options)
        self._faults = faults
        self._made = contextlib.ExitStack()

    def __call__(
        self, agent: Callable[..., Any] | WorkerSpec, world_size: int | None = None, **options: Any
    ) -> MPExecutor:
        """Make an executor; returns when every rank is ready. It has not been started.

        Args:
            agent: A `ModelAgent` class, a callable that makes one inside each rank, or a whole `WorkerSpec`, which is
                taken as it is.
            world_size: Number of ranks; None is that of the spec, of the fixture `mp_executor_options`, or else 2.
            options: Further fields of `WorkerSpec`.

        Raises:
            ConfigError: A value that cannot work, or a fault at a point that the agent does not have.
            StartupError: A rank did not become ready, perhaps by a fault; nothing is left behind.
        """
        if not isinstance(agent, WorkerSpec):
            options = {"world_size": 2, **self._options, **options}
        if world_size is not None:
            options["world_size"] = world_size
        given = make_spec(agent, options)
        spec = given if self._faults is None else self._faults.carried_by(given)
        try:
            executor = MPExecutor(spec, _warn=False)  # the fixture has chosen it, not the author of the test
        except StartupError as error:
            raise bad_point(error) or error from error.__cause__
        if self._faults is not None:
            self._faults.adopt(executor, armed=spec is not given)
        self._made.callback(self._finish, executor)
        return executor

    def release_all(self) -> None:
        """Release every executor, also one that is broken or released already.

        Raises:
            BaseException: A background task or a notified call had failed, and neither `wait_tasks` nor any other call
                has told the test. Calls by `notify` that are on their way have a second to fail. Where `faults` were
                meant for that executor, nothing is waited for, and the failure is logged instead.
        """
        self._made.close()

    def _finish(self, executor: MPExecutor) -> None:
        expected = self._faults is not None and self._faults.concern(executor)
        try:
            if not expected:
                _await_notified(executor, Deadline.after(_NOTIFIED_S))
            failure = _unheard(executor)
        finally:
            executor.release()
        if failure is None:
            return
        if expected:
            logger.warning("background failure of an executor that had faults: %r", failure)
            return
        failure.add_note("nobody had heard of this background failure; a test that expects it awaits wait_tasks()")
        raise failure


def _await_notified(executor: MPExecutor, deadline: Deadline) -> None:
    """Wait for the calls whose values nobody wants: they may fail yet, and a release would drop that."""
    for pending in executor._calls.in_flight():
        if pending is executor._background or pending.waited or pending.reply_ranks not in ((), NOBODY_WAITS):
            continue
        over = threading.Event()
        # Through the inbox, because the failure goes that way too, and before it.
        pending.on_done(lambda _, over=over: executor._inbox.post(over.set))  # type: ignore[misc]
        over.wait(deadline.remaining())


def _unheard(executor: MPExecutor) -> BaseException | None:
    """The failure of a background task that nothing has raised yet: one that was raised has a traceback."""
    failure = executor._background_error()
    return failure if failure is not None and failure.__traceback__ is None else None
