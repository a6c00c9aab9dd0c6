"""The ranks of tests, kept warm from one test to the next: started on demand, replaced when they have suffered."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.outcomes import OutcomeException

from mpexec.config import WorkerSpec
from mpexec.errors import MpexecError, RPCTimeoutError, WorkerDiedError
from mpexec.executor.base import State
from mpexec.executor.mp import MPExecutor
from mpexec.pytest_plugin.measuring import coverage_options
from mpexec.pytest_plugin.phases import Notes, Phase, RankSettings

logger = logging.getLogger(__name__)

_MOST_RANKS = 8
_START_S = 120.0
_STOP_S = 2.0
_FINISH_S = 10.0
_NOTES_S = 5.0
_ALIVE = (State.READY, State.RUNNING, State.STOPPED)

Key = tuple[int, str]


class WarmGroup:
    """Some ranks, each with a pytest session, that run one test after another.

    Raises:
        StartupError: A rank did not become ready; nothing is left.
    """

    def __init__(self, key: Key, settings: RankSettings) -> None:
        spec = WorkerSpec(
            agent=_make_agent,
            agent_args=(settings,),
            world_size=key[0],
            device="cpu",  # the agent chooses
            init_process_group=False,
            init_timeout=_START_S,
            stop_timeout=_STOP_S,
        )
        self.key = key
        self.tests = 0
        self.damage = ""
        self.executor = MPExecutor(spec, _warn=False)
        try:
            port = self.executor.collective_rpc("serve_store", ranks=0, reply_ranks=0, timeout=_START_S)
            self.executor.collective_rpc("meet", args=(port,), timeout=_START_S)
        except BaseException:
            self.executor.release()
            raise

    @property
    def usable(self) -> bool:
        """True while its ranks can run a test."""
        return self.executor.state in _ALIVE and not self.damage

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, index = rank."""
        return self.executor.pids

    def run(self, phase: Phase, seconds: float | None) -> list[Notes]:
        """Run one phase of one test on all ranks; what they wrote has been shown when this returns.

        Raises:
            PhaseFailed: Of the rank that failed first; further ones are in `others`.
            MpexecError: A rank has died, or the time is over; the ranks are lost.
        """
        try:
            return self.executor.collective_rpc("run_phase", args=(phase,), timeout=seconds)  # type: ignore[no-any-return]
        finally:
            self.executor.show_output()

    def take_notes(self) -> list[Notes]:
        """What a phase left on the ranks where it passed, after it failed on another; none from ranks that are lost."""
        if self.executor.state in _ALIVE:
            try:
                return self.executor.collective_rpc("take_notes", timeout=_NOTES_S)  # type: ignore[no-any-return]
            except MpexecError as error:
                logger.debug("no notes from the ranks: %s", error)
        return []

    def stacks(self) -> dict[int, str]:
        """What all ranks are doing."""
        return self.executor.rank_stacks()

    def finish(self) -> str:
        """End the sessions of the ranks in order, then the ranks.

        Returns:
            What a fixture or hook raised there; "" if none did.
        """
        failure = ""
        if self.executor.state in _ALIVE:
            try:
                self.executor.collective_rpc("finish", timeout=_FINISH_S)
            except (RPCTimeoutError, WorkerDiedError) as error:
                logger.warning("the ranks did not come to the end of their session: %s", error)
            except (Exception, OutcomeException) as error:  # of users' fixtures and hooks: whatever it is, the ranks go
                failure = "".join(traceback.format_exception_only(error)).rstrip()
                logger.warning("the end of the session failed on the ranks: %s", failure)
            self.executor.show_output()
        self.end()
        return failure

    def end(self) -> None:
        """End the ranks as they are."""
        self.executor.release()


class RankGroups:
    """All warm groups of one session, by number of ranks and device.

    Args:
        timeout: Default deadline of a test in seconds, 0 for none.

    Attributes:
        fresh: No ranks run a second test.
        failures: What was raised on ranks when they ended, after their last test.
    """

    def __init__(self, config: pytest.Config, timeout: float) -> None:
        self.timeout = timeout
        self._config = config
        self.fresh = bool(config.getoption("ranks_fresh"))
        self.failures: list[str] = []
        self._numbers = itertools.count(1)
        self._warm: OrderedDict[Key, WarmGroup] = OrderedDict()

    def take(self, key: Key) -> WarmGroup:
        """Ranks for the next test: those that there are, or new ones.

        Raises:
            StartupError: New ones could not be started.
        """
        group = self._warm.pop(key, None)
        if group is not None and not group.usable:
            self._finish(group)
            group = None
        if group is None:
            self._make_room(key[0])
            group = WarmGroup(key, self._settings(key[1]))
        self._warm[key] = group  # the last one is the one used last
        group.tests += 1
        return group

    def _make_room(self, ranks: int) -> None:
        while self._warm and sum(size for size, _ in self._warm) + ranks > _MOST_RANKS:
            self._finish(self._warm.popitem(last=False)[1])

    def _finish(self, group: WarmGroup) -> None:
        if failure := group.finish():
            self.failures.append(failure)

    def has(self, key: Key) -> bool:
        """True if there are ranks that can run another test."""
        return key in self._warm and self._warm[key].usable

    def done(self, group: WarmGroup) -> None:
        """A test has ended on these ranks; they are given up if they cannot, or are not to, run another."""
        if (self.fresh or not group.usable) and self._forget(group):
            self._finish(group)

    def give_up(self, group: WarmGroup) -> None:
        """These ranks are lost, or still at a test that has been given up: they end as they are."""
        if self._forget(group):
            group.end()

    def _forget(self, group: WarmGroup) -> bool:
        if self._warm.get(group.key) is not group:
            return False
        del self._warm[group.key]
        return True

    def close(self) -> None:
        """End all ranks; again changes nothing."""
        while self._warm:
            self._finish(self._warm.popitem()[1])

    def _settings(self, device: str) -> RankSettings:
        config = self._config
        return RankSettings(
            args=tuple(map(str, config.invocation_params.args)),
            folder=str(config.invocation_params.dir),
            basetemp=_new_folder(config, next(self._numbers)),
            workerinput=_workerinput(config),
            color=_has_color(config),
            device=device,
            coverage=coverage_options(forced=config.pluginmanager.has_plugin("_cov")),
            no_cov=config.pluginmanager.has_plugin("pytest_cov"),
        )


def _make_agent(settings: RankSettings) -> Any:
    # In the rank: the agent imports torch, which the driver is not to.
    from mpexec.pytest_plugin.agent import TestAgent

    return TestAgent(settings)


def _new_folder(config: pytest.Config, number: int) -> str:
    """Beside the driver's own `tmp_path` folders: pytest keeps the folders of the last three sessions only."""
    factory: Any = getattr(config, "_tmp_path_factory", None)
    if factory is None:  # -p no:tmpdir, which holds for the ranks too
        return ""
    folder = Path(factory.getbasetemp()) / f"ranks-{number}"
    folder.mkdir(mode=0o700)
    return str(folder)


def _workerinput(config: pytest.Config) -> Mapping[str, Any]:
    own = getattr(config, "workerinput", None)
    if own is not None:
        return {name: value for name, value in own.items() if not name.startswith("cov_")}
    facts = {"workerid": "master", "workercount": 1, "testrunuid": str(os.getpid()), "mainargv": list(sys.argv)}
    seed = getattr(config.option, "randomly_seed", None)  # pytest-randomly demands it of a worker
    return facts if seed is None else {**facts, "randomly_seed": seed}


def _has_color(config: pytest.Config) -> bool:
    with contextlib.suppress(AssertionError):  # there need not be a terminal reporter
        return bool(config.get_terminal_writer().hasmarkup)
    return False
