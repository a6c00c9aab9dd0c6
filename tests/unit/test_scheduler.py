"""Scheduler: who takes part in which step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from mpexec.agent.steps import StepInput, StepOutput
from mpexec.engine.request import Generation
from mpexec.engine.sampling_params import SamplingParams
from mpexec.engine.scheduler import Progress, Scheduler
from mpexec.errors import ConfigError, QueueFullError, TransportError

EOS = 99


def make(**fields: Any) -> Scheduler:
    settings = {"max_slots": 2, "max_queue": 4, "max_length": 32, "vocab_size": 100, "eos_token_ids": (EOS,), **fields}
    return Scheduler(**settings)


def params(new: int = 100, **fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, **fields)


def add(scheduler: Scheduler, request_id: int, prompt: tuple[int, ...], params: SamplingParams, **fields: Any) -> None:
    scheduler.add(request_id, Generation(prompt, params, **fields))


def run(scheduler: Scheduler, token: int | Callable[[int], int] = 7) -> tuple[StepInput, list[Progress]]:
    """One step in which every slot gets `token`, or what it gives for the slot."""
    step = scheduler.next_step()
    assert step is not None
    slots = [*step.decode, *(start.slot for start in step.prefill)]
    tokens = {slot: token(slot) if callable(token) else token for slot in slots}
    return step, scheduler.complete(StepOutput(step.step_id, tokens))


def test_an_empty_scheduler_has_no_step() -> None:
    assert make().next_step() is None


def test_a_prompt_is_prefilled_then_decoded_and_every_step_yields_one_token() -> None:
    scheduler = make()
    add(scheduler, 1, (5, 6), params(temperature=0.5, seed=3))
    step, progress = run(scheduler)
    assert [(one.token_ids, one.sampling.temperature, one.sampling.seed) for one in step.prefill] == [((5, 6), 0.5, 3)]
    assert step.decode == ()
    assert progress == [Progress(1, 7, None)]
    step, progress = run(scheduler, 8)
    assert (step.prefill, step.decode) == ((), (0,))
    assert progress == [Progress(1, 8, None)]


def test_the_first_step_frees_every_slot_so_that_a_used_agent_can_be_taken_over() -> None:
    scheduler = make(max_slots=3, first_step=41)
    add(scheduler, 1, (5,), params())
    step, _ = run(scheduler)
    assert (step.step_id, sorted(step.free)) == (41, [0, 1, 2])
    step, _ = run(scheduler)
    assert (step.step_id, step.free) == (42, ())


def test_requests_join_and_leave_between_steps_first_come_first_served() -> None:
    scheduler = make(max_slots=2)
    for request_id in (1, 2, 3, 4):
        add(scheduler, request_id, (5,), params(2))
    step, progress = run(scheduler)
    assert [one.request_id for one in progress] == [1, 2]
    assert (scheduler.running, scheduler.waiting) == (2, 2)
    step, progress = run(scheduler)
    assert [(one.request_id, one.finish_reason) for one in progress] == [(1, "length"), (2, "length")]
    step, progress = run(scheduler)
    assert sorted(step.free) == sorted(start.slot for start in step.prefill) == [0, 1]
    assert [one.request_id for one in progress] == [3, 4]
    add(scheduler, 5, (5,), params(1))
    step, progress = run(scheduler)
    assert len(step.decode) == 2
    assert step.prefill == ()
    step, progress = run(scheduler)
    assert [one.request_id for one in progress] == [5]
    assert scheduler.next_step() is None


def test_a_late_request_joins_while_another_is_decoded() -> None:
    scheduler = make()
    add(scheduler, 1, (5,), params())
    run(scheduler)
    add(scheduler, 2, (6,), params())
    step, progress = run(scheduler)
    assert (step.decode, [start.slot for start in step.prefill]) == ((0,), [1])
    assert {one.request_id for one in progress} == {1, 2}


def test_a_token_that_ends_the_text_is_the_last_one() -> None:
    scheduler = make()
    add(scheduler, 1, (5,), params())
    _, progress = run(scheduler, EOS)
    assert progress == [Progress(1, EOS, "stop")]
    assert scheduler.next_step() is None


def test_ignore_eos_goes_on_to_the_limit() -> None:
    scheduler = make()
    add(scheduler, 1, (5,), params(2, ignore_eos=True))
    assert run(scheduler, EOS)[1] == [Progress(1, EOS, None)]
    assert run(scheduler, EOS)[1] == [Progress(1, EOS, "length")]


def test_eos_as_the_last_allowed_token_counts_as_stop() -> None:
    scheduler = make()
    add(scheduler, 1, (5,), params(1))
    assert run(scheduler, EOS)[1] == [Progress(1, EOS, "stop")]


def test_the_context_limit_ends_a_text_with_reason_length() -> None:
    scheduler = make(max_length=6)
    add(scheduler, 1, (1, 2, 3), params())
    reasons = [run(scheduler)[1][0].finish_reason for _ in range(3)]
    assert reasons == [None, None, "length"]
    assert scheduler.next_step() is None


@pytest.mark.parametrize(
    "prompt, words",
    [
        ((), "no tokens"),
        (tuple(range(32)), "32 tokens"),
        ((1, 100), "token id 100"),
        ((-1,), "token id -1"),
        ((1.5,), "token id 1.5"),
    ],
)
def test_a_prompt_that_would_bring_down_the_ranks_is_refused(prompt: tuple[int, ...], words: str) -> None:
    scheduler = make()
    with pytest.raises(ConfigError, match=words):
        add(scheduler, 1, prompt, params())
    assert scheduler.next_step() is None


def test_the_queue_is_bounded_beyond_the_free_slots() -> None:
    scheduler = make(max_slots=2, max_queue=1)
    for request_id in (1, 2, 3):
        add(scheduler, request_id, (5,), params())
    with pytest.raises(QueueFullError, match="max_queue=1"):
        add(scheduler, 4, (5,), params())
    run(scheduler)
    with pytest.raises(QueueFullError):
        add(scheduler, 4, (5,), params())
    scheduler.cancel(3)
    add(scheduler, 4, (5,), params())


def test_cancelling_a_waiting_request_takes_it_out_of_the_queue() -> None:
    scheduler = make(max_slots=1)
    add(scheduler, 1, (5,), params(1))
    add(scheduler, 2, (5,), params(1))
    assert scheduler.cancel(2)
    run(scheduler)
    assert scheduler.next_step() is None


def test_cancelling_a_running_request_frees_its_slot_in_the_next_step() -> None:
    scheduler = make(max_slots=1)
    add(scheduler, 1, (5,), params())
    add(scheduler, 2, (6,), params())
    run(scheduler)
    assert scheduler.cancel(1)
    step, progress = run(scheduler)
    assert (step.free, step.decode, [start.token_ids for start in step.prefill]) == ((0,), (), [(6,)])
    assert [one.request_id for one in progress] == [2]


def test_the_token_of_a_request_cancelled_during_the_step_is_dropped() -> None:
    scheduler = make()
    add(scheduler, 1, (5,), params())
    add(scheduler, 2, (6,), params())
    step = scheduler.next_step()
    assert step is not None
    assert scheduler.cancel(1)
    assert [one.request_id for one in scheduler.complete(StepOutput(step.step_id, {0: 7, 1: 7}))] == [2]
    following, _ = run(scheduler)
    assert (following.free, following.decode) == ((0,), (1,))


def test_cancelling_twice_or_something_unknown_changes_nothing() -> None:
    scheduler = make()
    add(scheduler, 1, (5,), params())
    assert scheduler.cancel(1)
    assert not scheduler.cancel(1)
    assert not scheduler.cancel(17)


def test_an_output_of_another_step_or_without_a_slot_is_refused() -> None:
    scheduler = make()
    add(scheduler, 1, (5,), params())
    step = scheduler.next_step()
    assert step is not None
    with pytest.raises(TransportError, match=f"step {step.step_id + 1} arrived"):
        scheduler.complete(StepOutput(step.step_id + 1, {0: 7}))
    scheduler = make()
    add(scheduler, 1, (5,), params())
    step = scheduler.next_step()
    assert step is not None
    with pytest.raises(TransportError, match="slot 0"):
        scheduler.complete(StepOutput(step.step_id, {}))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_joins_leaves_and_is_cancelled_slots_stay_consistent_and_order_is_kept(seed: int) -> None:
    dice = random.Random(seed)
    scheduler = make(max_slots=3, max_queue=1000)
    held: set[int] = set()  # slots as the agent sees them
    started: list[int] = []
    tokens: dict[int, int] = {}
    wanted: dict[int, int] = {}
    cancelled: set[int] = set()
    for request_id in range(60):
        wanted[request_id] = dice.randrange(1, 8)
        add(scheduler, request_id, (dice.randrange(90),), params(wanted[request_id], seed=request_id))
    while (step := scheduler.next_step()) is not None:
        held -= set(step.free)
        for start in step.prefill:
            assert start.slot not in held
            held.add(start.slot)
            started.append(start.sampling.seed)
        assert set(step.decode) <= held
        if dice.random() < 0.3:
            victim = dice.randrange(60)
            if scheduler.cancel(victim):
                cancelled.add(victim)
        for one in scheduler.complete(StepOutput(step.step_id, dict.fromkeys(held, 7))):
            tokens[one.request_id] = tokens.get(one.request_id, 0) + 1
            assert (one.finish_reason == "length") == (tokens[one.request_id] == wanted[one.request_id])
            assert one.request_id not in cancelled
    assert started == sorted(started)
    assert {r for r in wanted if tokens.get(r) == wanted[r]} | cancelled == set(range(60))
