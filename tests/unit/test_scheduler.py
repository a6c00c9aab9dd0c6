"""Scheduler: who takes part in which step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from mpexec.agent.steps import StepInput, StepOutput, TokenLogprobs
from mpexec.engine.request import Generation
from mpexec.engine.sampling_params import SamplingParams
from mpexec.engine.scheduler import DEPTH, Pace, Progress, Scheduler
from mpexec.engine.tokenizer import TextStream, Tokenizer
from mpexec.errors import ConfigError, QueueFullError, TransportError
from mpexec.models import default_model_path

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


# -- two steps in flight -------------------------------------------------------------------------------------------


def answer(step: StepInput, token: int = 7) -> StepOutput:
    """The output of a step in which every slot gets `token`."""
    slots = [*step.decode, *(piece.slot for piece in step.prefill if piece.is_last)]
    return StepOutput(step.step_id, dict.fromkeys(slots, token))


def following(scheduler: Scheduler) -> StepInput:
    step = scheduler.next_step()
    assert step is not None
    return step


def test_the_next_step_is_there_before_the_tokens_of_this_one_and_no_more_than_two_are_in_flight() -> None:
    scheduler = make()
    add(scheduler, 1, (5,), params())
    steps = [following(scheduler) for _ in range(DEPTH)]
    assert (steps[0].prefill[0].slot, steps[1].decode) == (0, (0,))
    assert (scheduler.next_step(), scheduler.in_flight, scheduler.oldest_step_id) == (None, 2, steps[0].step_id)
    assert scheduler.complete(answer(steps[0])) == [Progress(1, 7, None)]
    assert following(scheduler).decode == (0,)


def test_an_end_by_count_is_known_beforehand_and_its_slot_serves_the_next_in_the_step_after() -> None:
    scheduler = make(max_slots=1)
    add(scheduler, 1, (5,), params(2))
    add(scheduler, 2, (6,), params(1))
    first, second = following(scheduler), following(scheduler)
    assert second.decode == (0,)
    assert scheduler.complete(answer(first)) == [Progress(1, 7, None)]
    third = following(scheduler)
    assert (third.free, third.decode, third.prefill[0].token_ids) == ((0,), (), (6,))
    assert scheduler.complete(answer(second)) == [Progress(1, 7, "length")]
    assert scheduler.next_step() is None  # not one step more than there are tokens
    assert scheduler.running == 1
    assert scheduler.complete(answer(third)) == [Progress(2, 7, "length")]
    assert (scheduler.running, scheduler.in_flight) == (0, 0)


def test_the_context_limit_is_known_beforehand_too() -> None:
    scheduler = make(max_length=4)
    add(scheduler, 1, (1, 2), params())
    steps = [following(scheduler), following(scheduler)]
    assert scheduler.next_step() is None
    reasons = [scheduler.complete(answer(step))[0].finish_reason for step in steps]
    assert (reasons, scheduler.next_step()) == ([None, "length"], None)


def test_an_end_by_a_token_wastes_one_token_and_frees_the_slot_in_the_step_after() -> None:
    scheduler = make(max_slots=1)
    add(scheduler, 1, (5,), params())
    add(scheduler, 2, (6,), params())
    first, second = following(scheduler), following(scheduler)
    assert scheduler.complete(answer(first, EOS)) == [Progress(1, EOS, "stop")]
    third = following(scheduler)
    assert (third.free, third.decode, third.prefill[0].token_ids) == ((0,), (), (6,))
    assert scheduler.complete(answer(second, 8)) == []
    assert scheduler.complete(answer(third, 9)) == [Progress(2, 9, None)]


def test_the_tokens_of_both_steps_are_dropped_after_a_cancellation() -> None:
    scheduler = make(max_slots=1)
    add(scheduler, 1, (5,), params())
    steps = [following(scheduler), following(scheduler)]
    assert scheduler.cancel(1)
    assert [scheduler.complete(answer(step)) for step in steps] == [[], []]
    assert (scheduler.next_step(), scheduler.running) == (None, 0)


def test_outputs_out_of_order_or_of_no_step_are_refused() -> None:
    scheduler = make()
    with pytest.raises(TransportError, match="expected none"):
        scheduler.complete(StepOutput(1, {}))
    add(scheduler, 1, (5,), params())
    following(scheduler)
    second = following(scheduler)
    with pytest.raises(TransportError, match=f"step {second.step_id} arrived, expected step {second.step_id - 1}"):
        scheduler.complete(answer(second))


# -- prompts in pieces ---------------------------------------------------------------------------------------------


def pieces(step: StepInput) -> list[tuple[int, int, int, bool]]:
    return [(piece.slot, piece.start, len(piece.token_ids), piece.is_last) for piece in step.prefill]


def test_a_long_prompt_is_cut_and_those_that_run_get_a_token_in_every_step() -> None:
    scheduler = make(max_length=90, prefill_chunk=16)
    add(scheduler, 1, (5,), params())
    run(scheduler)
    prompt = tuple(range(40))
    add(scheduler, 2, prompt, params())
    seen = []
    taken: tuple[int, ...] = ()
    for _ in range(4):
        step = following(scheduler)
        assert 0 in step.decode
        seen += pieces(step)
        taken += sum((piece.token_ids for piece in step.prefill), ())
        assert [one.request_id for one in scheduler.complete(answer(step))] == [1, 2][: 1 + (len(seen) >= 3)]
    assert seen == [(1, 0, 16, False), (1, 16, 16, False), (1, 32, 8, True)]
    assert taken == prompt


def test_what_fits_into_one_step_is_not_cut_and_shares_a_step_with_others_that_fit() -> None:
    scheduler = make(max_slots=8, max_queue=8, max_length=90, prefill_chunk=16)
    for request_id, length in enumerate([10, 6, 7, 20, 12, 2]):
        add(scheduler, request_id, tuple(range(length)), params())
    steps = [following(scheduler)]
    while pieces(steps[-1]):
        scheduler.complete(answer(steps[-1]))
        steps.append(following(scheduler))
    assert [pieces(step) for step in steps] == [
        [(0, 0, 10, True), (1, 0, 6, True)],
        [(2, 0, 7, True)],  # the next one needs several steps, and begins with a whole one
        [(3, 0, 16, False)],
        [(3, 16, 4, True), (4, 0, 12, True)],
        [(5, 0, 2, True)],
        [],
    ]


def test_a_prompt_that_is_cancelled_between_its_pieces_gives_its_slot_to_the_next() -> None:
    scheduler = make(max_slots=1, max_length=90, prefill_chunk=16)
    add(scheduler, 1, tuple(range(40)), params())
    add(scheduler, 2, (6,), params())
    first, second = following(scheduler), following(scheduler)
    assert scheduler.cancel(1)
    assert [scheduler.complete(answer(step)) for step in (first, second)] == [[], []]
    third = following(scheduler)
    assert (third.free, pieces(third)) == ((0,), [(0, 0, 1, True)])


# -- ends, logprobs, priorities ------------------------------------------------------------------------------------


def test_stop_tokens_end_the_text_and_have_none_of_their_own() -> None:
    tokenizer = Tokenizer.load(default_model_path())
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    scheduler = make(eos_token_ids=(a,))
    add(scheduler, 1, (5,), params(stop_token_ids=[b], ignore_eos=True), text=TextStream(tokenizer))
    assert run(scheduler, a)[1] == [Progress(1, a, None, "a")]
    assert run(scheduler, b)[1] == [Progress(1, b, "stop", "")]


def test_a_stop_string_ends_the_text_before_it_and_frees_the_slot() -> None:
    tokenizer = Tokenizer.load(default_model_path())
    scheduler = make(vocab_size=2048, max_slots=1)
    token_ids = tokenizer.encode("And there was light.")
    add(scheduler, 1, (5,), params(), text=TextStream(tokenizer, ("was l",)))
    add(scheduler, 2, (6,), params())
    progress = []
    flying = [following(scheduler), following(scheduler)]
    for token in token_ids:
        progress += [one for one in scheduler.complete(answer(flying.pop(0), token)) if one.request_id == 1]
        flying.append(following(scheduler))
        if progress[-1].finish_reason:
            break
    assert "".join(one.text for one in progress) == "And there "
    assert progress[-1].finish_reason == "stop"
    assert (flying[-1].free, flying[-1].prefill[0].token_ids) == ((0,), (6,))
    assert scheduler.complete(answer(flying[0], 9)) == []


def test_a_stop_string_with_the_last_token_counts_as_stop() -> None:
    tokenizer = Tokenizer.load(default_model_path())
    scheduler = make(vocab_size=2048)
    (token,) = tokenizer.encode("a")
    add(scheduler, 1, (5,), params(1), text=TextStream(tokenizer, ("a",)))
    assert run(scheduler, token)[1] == [Progress(1, token, "stop", "")]


def test_logprobs_come_with_their_token_and_their_lack_is_an_error() -> None:
    scheduler = make()
    add(scheduler, 1, (5,), params(logprobs=1))
    add(scheduler, 2, (6,), params())
    step = following(scheduler)
    known = TokenLogprobs(-0.5, ((7, -0.5),))
    one, two = scheduler.complete(StepOutput(step.step_id, {0: 7, 1: 7}, {0: known}))
    assert (one.logprobs, two.logprobs) == (known, None)
    with pytest.raises(TransportError, match="no logprobs for slot 0"):
        scheduler.complete(answer(following(scheduler)))


def test_the_agent_is_told_how_to_sample() -> None:
    scheduler = make()
    wanted = params(temperature=0.5, seed=3, top_k=4, top_p=0.5, min_p=0.1, repetition_penalty=1.5, logprobs=2)
    add(scheduler, 1, (5,), wanted)
    (piece,) = following(scheduler).prefill
    assert piece.sampling == wanted.sampling()
    assert (piece.sampling.top_k, piece.sampling.top_p, piece.sampling.min_p) == (4, 0.5, 0.1)
    assert (piece.sampling.repetition_penalty, piece.sampling.logprobs) == (1.5, 2)


def test_lower_priorities_start_first() -> None:
    scheduler = make(max_slots=1)
    add(scheduler, 1, (1,), params(1))
    add(scheduler, 2, (2,), params(1))
    add(scheduler, 3, (3,), params(1), priority=-1)
    assert [run(scheduler)[1][0].request_id for _ in range(3)] == [3, 1, 2]


def test_one_that_wants_to_wait_is_not_refused_and_starts_in_its_turn() -> None:
    scheduler = make(max_slots=1, max_queue=1)
    for request_id in (1, 2):
        add(scheduler, request_id, (5,), params(1))
    add(scheduler, 3, (5,), params(1), wait=True)
    with pytest.raises(QueueFullError):
        add(scheduler, 4, (5,), params(1))
    assert [run(scheduler)[1][0].request_id for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("priority", [1.5, True, "high", 1001, -1001])
def test_a_priority_that_is_none_is_refused(priority: Any) -> None:
    with pytest.raises(ConfigError, match="priority"):
        Generation((1,), params(), priority=priority)


# -- everything at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_whatever_joins_leaves_and_is_cancelled_slots_stay_consistent_and_order_is_kept(seed: int) -> None:
    dice = random.Random(seed)
    scheduler = make(max_slots=3, max_queue=1000, prefill_chunk=8)
    held: dict[int, int] = {}  # tokens in each slot, as the agent sees it
    started: list[int] = []
    tokens: dict[int, int] = {}
    wanted: dict[int, int] = {}
    cancelled: set[int] = set()
    stopped: set[int] = set()
    flying: list[tuple[StepInput, StepOutput]] = []
    for request_id in range(60):
        wanted[request_id] = dice.randrange(1, 8)
        prompt = tuple(dice.randrange(90) for _ in range(dice.randrange(1, 20)))
        add(scheduler, request_id, prompt, params(wanted[request_id], seed=request_id))
    while True:
        while (step := scheduler.next_step()) is not None:
            for slot in step.free:
                held.pop(slot, None)
            assert sum(len(piece.token_ids) for piece in step.prefill) <= 8
            for piece in step.prefill:
                assert held.get(piece.slot, 0) == piece.start
                held[piece.slot] = piece.start + len(piece.token_ids)
                if not piece.start:
                    started.append(piece.sampling.seed)
            for slot in step.decode:
                held[slot] += 1
            assert max(held.values()) < 32
            flying.append((step, answer(step, EOS if dice.random() < 0.05 else 7)))
        if not flying:
            break
        if dice.random() < 0.3:
            victim = dice.randrange(60)
            if scheduler.cancel(victim):
                cancelled.add(victim)
        for one in scheduler.complete(flying.pop(0)[1]):
            tokens[one.request_id] = tokens.get(one.request_id, 0) + 1
            is_last = tokens[one.request_id] == wanted[one.request_id]
            assert one.finish_reason == ("stop" if one.token_id == EOS else "length" if is_last else None)
            assert one.request_id not in cancelled | stopped
            if one.finish_reason == "stop":
                stopped.add(one.request_id)
    assert started == sorted(started)
    assert {r for r in wanted if tokens.get(r) == wanted[r]} | cancelled | stopped == set(range(60))
    assert (scheduler.running, scheduler.waiting) == (0, 0)


def test_at_the_pace_finish_what_has_begun_goes_on_and_nothing_begins() -> None:
    scheduler = make(max_slots=1, prefill_chunk=2)
    add(scheduler, 1, (1, 2, 3), params(2))
    add(scheduler, 2, (4,), params(1))
    run(scheduler)
    assert scheduler.take_started() == [1]
    scheduler.pace = Pace.FINISH
    run(scheduler)  # the rest of the prompt
    run(scheduler)
    assert scheduler.next_step() is None
    assert (scheduler.running_ids, scheduler.waiting) == ((), 1)
    scheduler.pace = Pace.FULL
    step, _ = run(scheduler)
    assert [one.token_ids for one in step.prefill] == [(4,)]
    assert scheduler.take_started() == [2]


def test_at_the_pace_none_there_is_no_step_though_requests_run() -> None:
    scheduler = make()
    add(scheduler, 1, (1,), params(3))
    run(scheduler)
    scheduler.pace = Pace.NONE
    assert scheduler.next_step() is None
    assert scheduler.running_ids == (1,)
    scheduler.pace = Pace.FULL
    assert run(scheduler)[0].decode == (0,)
