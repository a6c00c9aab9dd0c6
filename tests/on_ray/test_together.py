"""Executors beside each other, and room in the cluster: see `drive_together` for the checks."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="needs the extra: pip install 'mpexec[ray]'")

from on_ray.checking import Outcomes, outcomes_of
from on_ray.drive_together import CHECKS

pytestmark = [pytest.mark.spawn, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    return outcomes_of("drive_together.py", request)


@pytest.mark.parametrize("sentence", CHECKS.sentences)
def test_that(outcomes: Outcomes, sentence: str) -> None:
    outcomes.check(sentence)


def test_that_the_program_leaves_nothing(outcomes: Outcomes) -> None:
    outcomes.check_end()
