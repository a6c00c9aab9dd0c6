"""What the ranks of tests run: an agent that holds a pytest session, and a process group for each test."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Iterator

import torch

from mpexec.agent.base import ModelAgent
from mpexec.processes.streams import flush_standard_streams
from mpexec.pytest_plugin.measuring import Measuring
from mpexec.pytest_plugin.phases import Notes, Phase, PhaseFailed, RankSettings
from mpexec.pytest_plugin.process_group import TestProcessGroup
from mpexec.pytest_plugin.rank_config import RankPlugin
from mpexec.pytest_plugin.rank_session import RankSession


class TestAgent(ModelAgent):
    """One rank of tests.

    Args:
        settings: What the driver says of its own session.
    """

    __test__ = False

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings

    def build_model(self) -> None:
        """Start the pytest session of this rank."""
        self._measuring = Measuring(self._settings.coverage)
        self._missing = ""
        self._passed = Notes(self.rank)
        self._choose_device()
        self._group = TestProcessGroup(self.rank, self.world_size, self.device)
        self.report_progress("pytest configuration")
        self._session = RankSession(self._settings, RankPlugin(self.rank, self.world_size, self.device))

    def _choose_device(self) -> None:
        wanted = self._settings.device
        count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
        if count >= self.world_size:
            self.device = f"cuda:{self.local_rank}"
            torch.cuda.set_device(self.local_rank)
        elif wanted == "cuda":
            self._missing = f"needs {self.world_size} CUDA devices, and torch sees {count}"

    def serve_store(self) -> int:
        """Open the store of the group, on rank 0; its port."""
        return self._group.serve()

    def meet(self, port: int) -> None:
        """Connect to the store that rank 0 serves."""
        self._group.meet(port)
        with warnings.catch_warnings():  # policies leave Python one day, and with them what there is to reset
            warnings.simplefilter("ignore", DeprecationWarning)
            asyncio.set_event_loop_policy(None)

    def run_phase(self, phase: Phase) -> Notes:
        """Run one phase of a test.

        Raises:
            PhaseFailed: It did not pass here.
        """
        session, self._passed = self._session, Notes(self.rank)
        with _without_loop():
            try:
                if phase.when == "setup" or (phase.skipped and not self._missing):
                    self._begin(phase)
                session.run(phase)
            except PhaseFailed as failed:
                if phase.when == "teardown":
                    self._end(phase)
                    failed.notes.damage = session.take_notes().damage
                raise
            finally:
                flush_standard_streams()
            if phase.when == "teardown":
                self._end(phase)
        self._passed = session.take_notes()
        return self._passed

    def _begin(self, phase: Phase) -> None:
        if self._missing:
            raise PhaseFailed.of(None, "skipped", self._missing, None, self._session.take_notes())
        self._group.join(phase.number, phase.seconds)
        self._session.watch.begin()

    def _end(self, phase: Phase) -> None:
        if self._missing:
            return
        self._session.note_damage(self._session.watch.end())
        self._group.leave()

    def take_notes(self) -> Notes:
        """What the last phase has left if it passed here: another rank's failure took the place of what it returned."""
        return self._passed

    def finish(self) -> Notes:
        """Tear down the fixtures that are left, end the session, and save what was measured."""
        with _without_loop():
            try:
                self._session.finish()
            finally:
                self._group.leave()
                self._measuring.save()
                flush_standard_streams()
        return self._session.take_notes()


@contextlib.contextmanager
def _without_loop() -> Iterator[None]:
    """Hide the event loop that serves this rank: a test may run loops of its own."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
