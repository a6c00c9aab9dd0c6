"""The queue of outputs: nothing is lost, nothing overtakes, and the bound holds whoever is cancelled when."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mpexec.executor.outputs import Outputs, OutputWait


def sent(outputs: Outputs) -> bool:
    """Whether there was room for one more input at once."""
    return outputs.make_room().done


def test_outputs_wait_for_takers_and_takers_for_outputs_in_order() -> None:
    outputs = Outputs(10)
    for value in (1, 2):
        assert sent(outputs)
        outputs.put(value)
    assert [outputs.take().value for _ in range(2)] == [1, 2]
    takers = [outputs.take() for _ in range(2)]
    assert not any(taker.done for taker in takers)
    for value in (3, 4):
        assert sent(outputs)
        outputs.put(value)
    assert [taker.value for taker in takers] == [3, 4]


def test_the_bound_counts_inputs_whose_output_has_not_been_taken() -> None:
    outputs = Outputs(2)
    assert sent(outputs)
    assert sent(outputs)
    waiting = outputs.make_room()
    outputs.put("a")
    assert not waiting.done
    outputs.take()
    assert waiting.done
    assert not outputs.make_room().done


def test_a_change_is_announced() -> None:
    outputs = Outputs(1)
    told: list[str] = []
    taker = outputs.take()
    taker.watch(lambda: told.append("taker"))
    assert sent(outputs)
    sender = outputs.make_room()
    sender.watch(lambda: told.append("sender"))
    outputs.put(1)
    assert sorted(told) == ["sender", "taker"]


def test_a_failure_ends_every_wait_but_what_has_come_stays_takeable() -> None:
    outputs = Outputs(1)
    assert sent(outputs)
    outputs.put("came")
    sender = outputs.make_room()
    error = ValueError("x")
    outputs.fail(error)
    outputs.fail(KeyError("later"))
    assert sender.error is error
    assert outputs.take().value == "came"
    assert outputs.take().error is error
    assert outputs.make_room().error is error


def test_after_a_reset_the_queue_is_new() -> None:
    outputs = Outputs(1)
    assert sent(outputs)
    outputs.put("old")
    outputs.fail(ValueError("x"))
    outputs.reset()
    assert sent(outputs)
    taker = outputs.take()
    assert not taker.done
    outputs.put("new")
    assert taker.value == "new"


@pytest.mark.parametrize("value", [1, None, 0, ""])
def test_an_output_handed_to_somebody_who_left_goes_to_the_next(value: Any) -> None:
    outputs = Outputs(5)
    first, second = outputs.take(), outputs.take()
    assert sent(outputs)
    outputs.put(value)
    outputs.withdraw(first)
    assert second.done
    assert second.value == value


def test_an_output_handed_to_somebody_who_left_stays_the_next_one() -> None:
    outputs = Outputs(5)
    taker = outputs.take()
    for value in (None, 2):
        assert sent(outputs)
        outputs.put(value)
    outputs.withdraw(taker)
    assert [outputs.take().value for _ in range(2)] == [None, 2]


def test_room_granted_to_somebody_who_left_goes_to_the_next() -> None:
    outputs = Outputs(1)
    assert sent(outputs)
    first, second = outputs.make_room(), outputs.make_room()
    outputs.put(1)
    outputs.take()
    assert first.done
    outputs.withdraw(first)
    assert second.done
    outputs.withdraw(second)
    assert sent(outputs)


def test_those_who_left_before_get_nothing() -> None:
    outputs = Outputs(1)
    taker = outputs.take()
    outputs.withdraw(taker)
    assert sent(outputs)
    sender = outputs.make_room()
    outputs.withdraw(sender)
    outputs.put(1)
    assert not taker.done
    assert outputs.take().value == 1
    assert not sender.done
    assert sent(outputs)


def test_after_any_sequence_no_output_is_lost_and_no_room_leaks() -> None:
    for seed in range(200):
        rand = random.Random(seed)
        outputs = Outputs(3)
        in_flight: list[int] = []
        takers: list[OutputWait] = []
        senders: list[OutputWait] = []
        got: list[int] = []
        number = 0
        for _ in range(60):
            what = rand.choice(["send", "put", "take", "leave taker", "leave sender"])
            if what == "send":
                senders.append(outputs.make_room())
            elif what == "put" and in_flight:
                outputs.put(in_flight.pop(0))
            elif what == "take":
                takers.append(outputs.take())
            elif what == "leave taker" and takers:
                outputs.withdraw(takers.pop(rand.randrange(len(takers))))
            elif what == "leave sender" and senders:
                outputs.withdraw(senders.pop(rand.randrange(len(senders))))
            for sender in [one for one in senders if one.done]:
                senders.remove(sender)
                in_flight.append(number)
                number += 1
            if rand.random() < 0.5:
                for taker in [one for one in takers if one.done]:
                    takers.remove(taker)
                    got.append(taker.value)
        for sender in senders:
            outputs.withdraw(sender)
        while in_flight:
            outputs.put(in_flight.pop(0))
        for taker in takers:
            if taker.done:
                got.append(taker.value)
            else:
                outputs.withdraw(taker)
        while (rest := outputs.take()).done:
            got.append(rest.value)
        outputs.withdraw(rest)
        assert sorted(got) == list(range(number)), seed
        assert [sent(outputs) for _ in range(4)] == [True, True, True, False], seed
