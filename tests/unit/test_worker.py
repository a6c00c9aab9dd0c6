"""BaseWorker and the dispatcher: which method a name means, and that every call is answered exactly once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mpexec import BaseWorker, ConfigError, ModelAgent, WorkerSpec
from mpexec.messages import Call
from mpexec.worker.dispatch import Dispatcher


async def bounded(work: Any) -> Any:
    async with asyncio.timeout(20):
        return await work


class Agent(ModelAgent):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.given = args, kwargs
        self.instance_method = lambda: "instance"
        self.trace: list[str] = []

    def build_model(self) -> None:
        self.report_progress("half built")

    def shared(self) -> str:
        return "agent"

    def only_agent(self) -> str:
        return "agent"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @staticmethod
    def static() -> str:
        return "static"

    @property
    def computed(self) -> int:
        raise AssertionError("names are listed without computing properties")

    value = 5

    def forward(self, inputs: Any) -> Any:
        return inputs

    def fail(self) -> None:
        raise ValueError("sync")

    def fail_below_exception(self) -> None:
        raise asyncio.CancelledError

    def leave(self) -> None:
        raise SystemExit(3)

    async def fail_async(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("async")

    async def hold(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.trace.append("ended")


class Worker(BaseWorker):
    def shared(self) -> str:
        return "worker"


Made = tuple[BaseWorker, list[Any], list[str]]


def make(worker_cls: type[BaseWorker] = BaseWorker, rank: int = 0, **fields: Any) -> Made:
    """A built worker, what it puts out, and what it reports."""
    outputs: list[Any] = []
    reports: list[str] = []
    spec = WorkerSpec(**{"agent": Agent, "world_size": 2, **fields})
    worker = worker_cls(
        spec, rank=rank, local_rank=rank, device="cpu", put_output=outputs.append, report=reports.append
    )
    worker.build_model()
    return worker, outputs, reports


def test_the_agent_is_made_with_its_arguments_and_bound_before_it_builds() -> None:
    worker, _, reports = make(rank=1, agent_args=(1,), agent_kwargs={"two": 2})
    agent = worker.agent
    assert isinstance(agent, Agent)
    assert agent.given == ((1,), {"two": 2})
    assert (agent.rank, agent.world_size, agent.local_rank, agent.device) == (1, 2, 1, "cpu")
    assert reports == ["build agent", "build model", "half built"]


def test_something_else_than_an_agent_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="dict"):
        make(agent=dict)


def test_names_mean_the_workers_own_methods_first() -> None:
    worker, _, _ = make(Worker)
    assert worker.find("shared")() == "worker"
    assert worker.find("only_agent")() == "agent"


def test_every_listed_name_can_be_found_and_every_public_method_is_listed() -> None:
    worker, _, _ = make(Worker)
    names = worker.method_names()
    wanted = {"shared", "only_agent", "of_class", "static", "instance_method", "build_model", "start", "wait_tasks"}
    assert wanted <= names
    assert not any(name.startswith("_") for name in names)
    assert not {"value", "rank", "computed", "spec"} & names
    for name in names:
        assert callable(worker.find(name))


@pytest.mark.parametrize("name", ["_open", "__init__", "value", "nothing", ""])
def test_other_names_are_not_found(name: str) -> None:
    with pytest.raises(AttributeError, match="public method"):
        make()[0].find(name)


async def test_outputs_of_rank_0_are_put_out_and_those_of_other_ranks_are_not() -> None:
    for rank in (0, 1):
        worker, outputs, _ = make(rank=rank)
        worker.start()
        for number in range(5):
            worker.set_forward_inputs(number)
        for _ in range(100):
            await asyncio.sleep(0)
        assert outputs == ([0, 1, 2, 3, 4] if rank == 0 else [])
        assert worker.agent is not None
        assert worker.agent._outputs.empty()  # nor do they pile up
        await worker.stop_async()


async def test_a_failure_of_the_agents_tasks_is_the_workers() -> None:
    class Failing(Agent):
        def forward(self, inputs: Any) -> Any:
            raise ValueError("forward")

    worker, _, _ = make(agent=Failing)
    worker.start()
    worker.set_forward_inputs(1)
    with pytest.raises(ValueError, match="forward"):
        await bounded(worker.wait_tasks())
    await worker.stop_async()


def test_release_works_before_anything_was_built_and_twice() -> None:
    released: list[int] = []

    class Releasing(Agent):
        def release(self) -> None:
            released.append(1)

    worker, _, _ = make(agent=Releasing)
    worker.release()
    worker.release()
    assert released == [1]
    assert worker.agent is None


# -- dispatcher ------------------------------------------------------------------------------------------------------


class Reports:
    """What a dispatcher reports, and the dispatcher."""

    def __init__(self, *, exits_pass: bool = True) -> None:
        self.all: list[tuple[int, Any, type | None]] = []
        self.noted: list[str] = []
        self.worker, _, _ = make()
        self.dispatcher = Dispatcher(self.worker, self.add, self.note, exits_pass=exits_pass)

    def note(self, name: str, ns: int) -> None:
        assert ns > 0
        self.noted.append(name)

    def add(self, call: Call, value: Any, error: BaseException | None) -> None:
        self.all.append((call.call_id, value, None if error is None else type(error)))

    async def come(self, count: int) -> None:
        while len(self.all) < count:
            await asyncio.sleep(0)


async def test_sync_methods_run_to_their_end_in_order_and_coroutines_start_in_it() -> None:
    reports = Reports()
    reports.dispatcher.run(Call(1, "shared"))
    reports.dispatcher.run(Call(2, "fail_async"))
    reports.dispatcher.run(Call(3, "only_agent"))
    assert [call_id for call_id, _, _ in reports.all] == [1, 3]
    await bounded(reports.come(3))
    assert reports.all[2] == (2, None, ValueError)
    assert reports.noted == ["fail_async"], "coroutines are timed here"


async def test_every_kind_of_failure_is_reported_once() -> None:
    reports = Reports()
    for call_id, method in enumerate(("fail", "fail_below_exception", "nothing"), 1):
        reports.dispatcher.run(Call(call_id, method))
    reports.dispatcher.run(Call(4, "shared", args=(1,)))
    kinds = [kind for _, _, kind in reports.all]
    assert kinds == [ValueError, asyncio.CancelledError, AttributeError, TypeError]


async def test_leaving_passes_through_where_it_ends_the_process_and_is_a_failure_elsewhere() -> None:
    with pytest.raises(SystemExit):
        Reports(exits_pass=True).dispatcher.run(Call(1, "leave"))
    reports = Reports(exits_pass=False)
    reports.dispatcher.run(Call(1, "leave"))
    assert reports.all == [(1, None, SystemExit)]


async def test_a_cancelled_call_ends_and_reports_nothing_more() -> None:
    reports = Reports()
    reports.dispatcher.run(Call(1, "hold"))
    await asyncio.sleep(0)
    reports.dispatcher.cancel(1)
    reports.dispatcher.cancel(1)
    reports.dispatcher.cancel(99)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert reports.worker.agent.trace == ["ended"]  # type: ignore[union-attr]
    assert reports.all == reports.noted == []


async def test_cancelling_all_waits_until_they_are_gone() -> None:
    reports = Reports()
    for call_id in range(1, 4):
        reports.dispatcher.run(Call(call_id, "hold"))
    await asyncio.sleep(0)
    await bounded(reports.dispatcher.cancel_all())
    assert reports.worker.agent.trace == ["ended"] * 3  # type: ignore[union-attr]
    assert reports.all == []


async def test_a_callable_gets_the_worker() -> None:
    reports = Reports()
    reports.dispatcher.run(Call(1, lambda worker, number: (worker.rank, number), args=(5,)))
    assert reports.all == [(1, (0, 5), None)]
