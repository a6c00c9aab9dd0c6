"""Who starts next: priorities, the order within them, and that nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from mpexec.engine.waiting_line import PASSES, WaitingLine


def drain(line: WaitingLine[str]) -> list[str]:
    return [line.take() for _ in range(len(line))]


def test_lower_priorities_are_taken_first_and_within_one_the_oldest() -> None:
    line: WaitingLine[str] = WaitingLine()
    for key, (item, priority) in enumerate([("b1", 1), ("a1", 0), ("b2", 1), ("a2", 0), ("first", -5)]):
        line.join(key, item, priority)
    assert line.next() == "first"
    assert drain(line) == ["first", "a1", "a2", "b1", "b2"]
    assert (len(line), line.next()) == (0, None)


def test_who_gives_up_is_not_taken_and_asking_twice_says_so() -> None:
    line: WaitingLine[str] = WaitingLine()
    for key, item in enumerate("abc"):
        line.join(key, item, 0)
    assert line.leave(1)
    assert not line.leave(1)
    assert not line.leave(17)
    assert drain(line) == ["a", "c"]


def test_urgent_ones_that_never_stop_coming_pass_an_older_one_a_few_times_only() -> None:
    line: WaitingLine[str] = WaitingLine()
    line.join(0, "patient", 1000)
    taken = []
    for key in range(1, 30):
        line.join(key, "urgent", -1000)
        taken.append(line.take())
    assert taken.index("patient") == PASSES
    assert taken.count("patient") == 1


@pytest.mark.parametrize("seed", range(10))
def test_everybody_is_taken_within_the_promised_number_of_turns(seed: int) -> None:
    dice = random.Random(seed)
    line: WaitingLine[int] = WaitingLine()
    promised: dict[int, int] = {}
    turn = key = 0
    while turn < 400:
        for _ in range(dice.randrange(3) if turn < 300 else 0):
            promised[key] = turn + (PASSES + 1) * (len(line) + 1)
            line.join(key, key, dice.randrange(-3, 3))
            key += 1
        if dice.random() < 0.1:
            line.leave(dice.randrange(key + 1))
        turn += 1
        if len(line):
            assert promised[line.take()] >= turn
    assert len(line) == 0
