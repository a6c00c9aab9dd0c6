"""Large arguments and results, and what they leave in the object store: see `drive_large` for the checks."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="needs the extra: pip install 'mpexec[ray]'")

from on_ray.checking import Outcomes, outcomes_of
from on_ray.drive_large import CHECKS

pytestmark = [pytest.mark.spawn, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    return outcomes_of("drive_large.py", request)


@pytest.mark.parametrize("sentence", CHECKS.sentences)
def test_that(outcomes: Outcomes, sentence: str) -> None:
    outcomes.check(sentence)


def test_that_the_program_leaves_nothing(outcomes: Outcomes) -> None:
    outcomes.check_end()
