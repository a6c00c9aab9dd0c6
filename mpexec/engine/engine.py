"""Engine: prompts in, text out, piece by piece, over one model that is split over several ranks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from mpexec.agent.checkpoint import CheckpointFacts, check_libraries, check_tensor_parallel, read_checkpoint
from mpexec.agent.hub import resolve_model
from mpexec.agent.steps import TokenLogprobs
from mpexec.config import EngineConfig, WorkerSpec, check_flags
from mpexec.engine.engine_loop import EngineLoop
from mpexec.engine.health import Health, RankHealth
from mpexec.engine.metrics import Metrics
from mpexec.engine.operations import Operations, Weights
from mpexec.engine.profiling import check_file, profiling, write_trace
from mpexec.engine.request import FinishReason, Generation, RequestManager, RequestType
from mpexec.engine.sampling_params import SamplingParams, items_of
from mpexec.engine.scheduler import DEPTH, Scheduler, check_prompt
from mpexec.engine.tokenizer import TextStream, Tokenizer
from mpexec.errors import ConfigError
from mpexec.executor.threads import in_thread
from mpexec.tasks import TaskOwner, TaskSet
from mpexec.worker.profiling import discard_profile, start_profile, stop_profile

if TYPE_CHECKING:
    from mpexec.agent.base import ModelAgent
    from mpexec.executor.base import Executor

__all__ = ["Engine", "GenerationOutput", "Health", "Metrics", "RankHealth", "SamplingParams"]

_DEFAULT_MAX_LENGTH = 4096  # of a model whose own limit is larger: the cache has room for every slot at full length
_EXECUTOR_SHARE = 0.8  # of the stop timeout, so that the executor's ladder ends before the engine's patience
_FAILURE_GRACE_S = 0.3  # ranks are at one step together: a peer that has not answered by then sits in a collective
_LOOP_PATIENCE_S = 1.0  # for a busy event loop to notice a stop from another thread

_STATES = {"awake": "running", "draining": "draining", "asleep": "sleeping"}

Backend = Literal["auto", "uni", "mp", "ray"]


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One piece of an answer.

    Attributes:
        text: The text since the piece before; never ends inside a character or a stop string, and may be empty.
        token_ids: The tokens since the piece before. A token that ends the text is among them, without text of its own.
        finish_reason: "stop" or "length" in the last piece, else None.
        prompt_token_ids: The whole prompt, as the model saw it.
        logprobs: One for each of `token_ids`; None unless they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


def causal_lm_agent(*args: Any, **kwargs: Any) -> ModelAgent:
    """Make the agent inside a rank: naming the class here would import torch in the driver."""
    from mpexec.agent.causal_lm import CausalLMAgent

    return CausalLMAgent(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model folder that can run over `tp` ranks, checked before any rank starts.

    Attributes:
        max_length: Most tokens of prompt and answer together.
        tokenizer: None where the folder has none, or the library is missing: token ids only.
    """

    facts: CheckpointFacts
    tp: int
    max_length: int
    tokenizer: Tokenizer | None

    @classmethod
    def read(cls, path: str | Path | None, tp: int, config: EngineConfig) -> ModelPlan:
        """Read a folder, that of a name on the hub, or that of the bundled model.

        Raises:
            ConfigError: The folder cannot be used, `tp` does not divide its heads, `config` asks for too much, or what
                loads a model is not installed.
        """
        check_libraries(tp)  # before a download that may take minutes
        if path is None:
            from mpexec.models import default_model_path

            path = default_model_path()
        facts = read_checkpoint(resolve_model(path))
        check_tensor_parallel(facts, tp)
        if not facts.nbytes:
            raise ConfigError(
                f"{facts.path} has no weights: expected *.safetensors or *.bin files; copy the model again"
            )
        return cls.of_facts(facts, tp, _max_length(facts, config))

    @classmethod
    def of_facts(cls, facts: CheckpointFacts, tp: int, max_length: int) -> ModelPlan:
        """The plan for a model that has been checked, perhaps by another process; its tokenizer is read here."""
        has_text = (facts.path / "tokenizer.json").is_file() and _has_tokenizers()
        return cls(facts, tp, max_length, Tokenizer.load(facts.path) if has_text else None)

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The token ids of a prompt, checked against the limits of the model.

        Raises:
            ConfigError: Empty, too long, not of this vocabulary, or text for a model without tokenizer.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise ConfigError("the prompt is empty: give at least one character")
            token_ids = (self.tokenizer or Tokenizer.load(self.facts.path)).encode(prompt)
        else:
            items = items_of(prompt)
            if items is None:
                raise ConfigError(f"a {type(prompt).__name__} is no prompt: give a text, or a list of token ids")
            token_ids = items
        check_prompt(token_ids, max_length=self.max_length, vocab_size=self.facts.vocab_size, limit=self._limit())
        return token_ids

    def _limit(self) -> str:
        """The limit of a text for people, and what could raise it."""
        if self.max_length >= self.facts.longest:
            return f"{self.max_length} tokens"
        default = "the default; " if self.max_length == _DEFAULT_MAX_LENGTH else ""
        return f"{self.max_length} tokens ({default}max_length raises it up to {self.facts.longest})"

    def text_stream(self, params: SamplingParams) -> TextStream | None:
        """What makes the text of one answer; None for a model without tokenizer.

        Raises:
            ConfigError: There are stop strings, and no tokenizer that could find them.
        """
        if self.tokenizer is None:
            if params.stop_strings:
                raise ConfigError(f"stop={params.stop!r}: {self.facts.path} has no tokenizer; use stop_token_ids")
            return None
        return TextStream(self.tokenizer, params.stop_strings)

    def worker_spec(self, config: EngineConfig, *, dtype: str = "float32", **fields: Any) -> WorkerSpec:
        """What the ranks need; `fields` are further fields of `WorkerSpec`."""
        return WorkerSpec(
            agent=causal_lm_agent,
            world_size=self.tp,
            agent_args=(str(self.facts.path.resolve()),),
            agent_kwargs={"max_slots": config.max_slots, "max_length": self.max_length, "dtype": dtype},
            **{
                "stop_timeout": config.stop_timeout * _EXECUTOR_SHARE,
                "failure_grace": _FAILURE_GRACE_S,
                **fields,
            },
        )

    def scheduler(self, config: EngineConfig, first_step: int) -> Scheduler:
        """An empty scheduler with the limits of model and engine."""
        return Scheduler(
            max_slots=config.max_slots,
            max_queue=config.max_queue,
            max_length=self.max_length,
            vocab_size=self.facts.vocab_size,
            eos_token_ids=self.facts.eos_token_ids,
            first_step=first_step,
            prefill_chunk=config.prefill_chunk,
        )


def _check_outputs(most: Any) -> None:
    """Refuse a bound of outputs that are not taken, at which the engine would wait for itself."""
    if isinstance(most, int) and most < DEPTH:
        raise ConfigError(f"max_outputs={most}: an engine keeps {DEPTH} steps in flight; use at least {DEPTH}")


def _has_tokenizers() -> bool:
    from importlib.util import find_spec

    return find_spec("tokenizers") is not None


def _max_length(facts: CheckpointFacts, config: EngineConfig) -> int:
    if config.max_length is None:
        return min(facts.longest, _DEFAULT_MAX_LENGTH)
    if config.max_length > facts.longest:
        raise ConfigError(f"max_length={config.max_length}: {facts.path.name} allows 2 to {facts.longest} tokens")
    return config.max_length


class Engine(TaskOwner):
    """Serves requests with one executor; lives on the event loop on which it is started.

    `wait_tasks` raises the root cause when a rank or a task of the engine fails; requests hear of it by themselves. By
    then the ranks are gone: a failed engine can be released, but not started again. After a plain `stop` it can, on any
    loop.

    Args:
        executor: Its agent understands `mpexec.agent.steps`. The engine starts, stops and releases it. It must take
            two inputs before an output is taken: `max_outputs` of at least 2.
        plan: The model that the agent runs.
        config: Limits; the slots must be those of the agent.
    """

    def __init__(self, executor: Executor, plan: ModelPlan, config: EngineConfig) -> None:
        super().__init__()
        _check_outputs(executor.spec.max_outputs)
        self.executor = executor
        self.requests = RequestManager()
        self._plan = plan
        self._stop_timeout = config.stop_timeout
        self._is_profiled = False  # as far as known here: a start that was cancelled or failed counts
        self._stall_timeout = config.stall_timeout
        self._engine_loop = EngineLoop(executor, lambda first_step: plan.scheduler(config, first_step), self.requests)
        self._operations = Operations(executor, self._engine_loop, self.requests, config.stall_timeout)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | None = None,
        tp: int = 1,
        *,
        backend: Backend = "auto",
        config: EngineConfig | None = None,
        dtype: str = "float32",
        **fields: Any,
    ) -> Self:
        """Load a model over `tp` ranks; blocks until every rank is ready. `start` and `generate` come next.

        Args:
            path: Local folder with a Hugging Face causal language model, or the name of one on the hub (see
                `resolve_model`); None is the bundled one.
            tp: Number of ranks that share every layer.
            backend: "auto" runs a model on one rank inside this process, else each rank is a process; where a Ray
                cluster is named (`address`, or `RAY_ADDRESS`) or this machine has too few GPUs, each is an actor of
                Ray's. On several machines the folder must be there on each of them, under the same path.
            config: Limits of the engine.
            dtype: Of weights and cache: "float32", "bfloat16" or "float16".
            fields: Further fields of `WorkerSpec`, for example `start_method` and `device`, and where the executor is
                Ray's those of `RayOptions`, for example `address` and `placement_group`.

        Raises:
            ConfigError: Found before any rank starts.
            StartupError: A rank did not become ready; nothing is left behind.
        """
        from mpexec.executor import build_executor

        config = config or EngineConfig()
        plan = ModelPlan.read(path, tp, config)
        _check_outputs(fields.get("max_outputs"))  # before any rank starts
        return cls(build_executor(plan.worker_spec(config, dtype=dtype), backend, **fields), plan, config)

    @classmethod
    async def from_pretrained_async(
        cls,
        path: str | Path | None = None,
        tp: int = 1,
        *,
        backend: Backend = "auto",
        config: EngineConfig | None = None,
        dtype: str = "float32",
        **fields: Any,
    ) -> Self:
        """As `from_pretrained`, without blocking the loop. Cancelling it ends the ranks that were started."""
        from mpexec.executor import build_executor_async

        limits = config or EngineConfig()
        _check_outputs(fields.get("max_outputs"))
        plan = await in_thread(lambda: ModelPlan.read(path, tp, limits), name="mpexec-read-model")
        executor = await build_executor_async(plan.worker_spec(limits, dtype=dtype), backend, **fields)
        return cls(executor, plan, limits)

    @property
    def plan(self) -> ModelPlan:
        """The model and its limits."""
        return self._plan

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, index = rank. With Ray each is that of its own node."""
        return self.executor.pids

    @property
    def rank_nodes(self) -> tuple[str, ...]:
        """Addresses of the nodes that Ray has put the ranks on, index = rank; empty with any other executor."""
        return tuple(row["node"] for row in self.executor.describe()["ranks"] if "node" in row)

    @property
    def stall_timeout(self) -> float | None:
        """See `EngineConfig`."""
        return self._stall_timeout

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        wait: bool = False,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Continue a prompt; iterate over the result with `async for`.

        The request joins at the first iteration. A reader that is slower than the model gets several tokens at once.
        Leaving the loop, closing the generator or cancelling the task takes the request out before the next step.

        Args:
            prompt: Text, or token ids.
            params: How to sample and when to end.
            priority: Among the requests that wait for a slot, lower ones start first, and within a priority the oldest.
                Of nine that start, one at least is the one that has waited longest, so that nobody waits for ever.
            wait: Where the queue is full, wait all the same; False raises `QueueFullError`.

        Raises:
            ConfigError: At once: the prompt is empty, too long or not of this vocabulary, or a value cannot work.
            QueueFullError: While iterating: no room for another request.
            EngineStoppedError: While iterating: the engine failed (`__cause__` is the root cause) or was stopped.
            WrongStateError: While iterating: never started, or started on another event loop.
        """
        params = params or SamplingParams()
        text = self._plan.text_stream(params)
        return self._generate(Generation(self._plan.encode(prompt), params, text, priority, wait))

    async def _generate(self, generation: Generation) -> AsyncGenerator[GenerationOutput, None]:
        request = self.requests.post_request(RequestType.GENERATE, generation)
        prompt = generation.prompt_token_ids
        try:
            while True:
                response = await request.receive_async()
                if (error := response.to_exception()) is not None:
                    raise error
                yield GenerationOutput(
                    response.text, response.token_ids, response.finish_reason, prompt, response.logprobs
                )
                if response.is_last:
                    return
        finally:
            self.requests.post_cancel(request)

    # -- operations ----------------------------------------------------------------------------------------------------

    async def sleep_async(self, level: int = 1, *, drain_timeout: float | None = None) -> None:
        """Finish what runs, then have every rank give back what it can; returns when all have.

        Requests that wait for a slot, and new ones, wait until `wakeup_async` (within `max_queue`, as ever); none is
        lost. The level is for the agent: `CausalLMAgent` knows 1, which frees the cache, and on CUDA moves the weights
        to memory of the host. A sleeping engine stays healthy, and asleep over a stop and a start. Asleep already, this
        changes nothing. Cancelling it while requests are being finished gives it up.

        Args:
            level: How deep; see the agent.
            drain_timeout: Seconds for the requests that run; those that have not ended by then end with
                `EngineStoppedError`. None waits for them. A step under way is waited for beyond that.

        Raises:
            ConfigError: A bad value; the engine serves on.
            WrongStateError: Not started.
            TimeoutError: The step under way then did not end within `stall_timeout`; it names what ranks are at.
            EngineStoppedError: It was stopped, or failed, meanwhile.
            BaseException: A rank failed, and the engine with it.
        """
        await self._operations.sleep_async(level, drain_timeout)

    async def wakeup_async(self) -> None:
        """Have every rank take again what it had given back, and serve on; awake, changes nothing.

        Raises:
            EngineStoppedError: The engine was stopped, or had failed.
            BaseException: A rank failed, for lack of memory for example, and the engine with it.
        """
        await self._operations.wakeup_async()

    async def update_params_async(
        self, weights: Weights, *, drain: bool = True, drain_timeout: float | None = None
    ) -> None:
        """Give the model other weights, on every rank, without a restart; returns when all have them.

        Requests that wait, and new ones, begin when it is over. Nothing else is reset.

        Args:
            weights: A state dict of whole tensors by their names in a checkpoint, or the path of a safetensors file, or
                of a folder of them, that every rank can read.
            drain: Let requests that run end with the weights with which they began. False changes the weights between
                two steps: running answers go on with the new ones, over keys and values of the old ones.
            drain_timeout: As in `sleep_async`; without a drain no request is ended, and it has no effect.

        Raises:
            ConfigError: No such file, or no tensors; or the ranks refused the weights. The old ones serve on.
            ValueError: The ranks refused: names or shapes are not those of the model. The old ones serve on.
            WrongStateError: Not started, or asleep.
            TimeoutError: As in `sleep_async`.
            EngineStoppedError: It was stopped, or failed, meanwhile. Several ranks may have different weights after a
                stop: the engine can then be released, but not started again.
            BaseException: A rank failed, and the engine with it.
        """
        await self._operations.update_params_async(weights, drain, drain_timeout)

    def profile(
        self, path: str | Path, *, record_shapes: bool = False, with_stack: bool = False
    ) -> AbstractAsyncContextManager[Path]:
        """Profile all ranks while a block runs: `async with engine.profile("trace.json"): ...`.

        The file, a chrome trace for https://ui.perfetto.dev, shows the ranks side by side; it is compressed if its name
        ends in `.gz`. Steps are slower meanwhile.

        Args:
            path: Of the file; an old one is replaced, and a link is followed.
            record_shapes: Note the shapes of the operators' arguments.
            with_stack: Note where in Python they were called.

        Raises:
            ConfigError: On entry: the file cannot be written there, or the ranks are being profiled already.
        """
        return profiling(self, path, record_shapes=record_shapes, with_stack=with_stack)

    async def start_profile_async(self, *, record_shapes: bool = False, with_stack: bool = False) -> None:
        """Begin to profile all ranks, between two steps; `stop_profile_async` ends it.

        Raises:
            ConfigError: The ranks are being profiled already, or a value is neither True nor False.
        """
        check_flags(record_shapes=record_shapes, with_stack=with_stack)
        self._is_profiled = True
        await self.executor.collective_rpc_async(start_profile, (record_shapes, with_stack), reply_ranks=())

    async def stop_profile_async(self, path: str | Path) -> Path:
        """End the profile, between two steps, and write it; returns its absolute path.

        Raises:
            ConfigError: The file cannot be written there, and the profile goes on; or there is none.
            OSError: The disk is full, or the like.
        """
        file = check_file(path)
        traces = await self.executor.collective_rpc_async(stop_profile)
        self._is_profiled = False
        await in_thread(lambda: write_trace(file, traces, self.rank_pids), name="mpexec-write-trace")
        return file

    async def discard_profile_async(self) -> None:
        """End the profile, if there is one, without a file."""
        await self.executor.collective_rpc_async(discard_profile, reply_ranks=())
        self._is_profiled = False

    # -- what people see -----------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Whether requests are served, and what every rank is at; no rank is asked, so this never waits for one."""
        ended = self.requests.stop_response
        ranks = tuple(RankHealth.of_row(row) for row in self.executor.describe()["ranks"])
        if ended is not None:
            reason = ended.to_exception()
            return Health(False, "stopped", reason.__cause__ if reason is not None else None, ranks)
        if not self.requests.accepting:
            return Health(False, "new", ranks=ranks)
        state = _STATES[self._operations.state]
        step_age = self._engine_loop.telemetry.step_age()
        return Health(True, state, ranks=ranks, step_age=step_age).judged(self._stall_timeout)

    def metrics(self) -> Metrics:
        """The counts and durations of this moment; no rank is asked."""
        loop = self._engine_loop
        counted: dict[str, Any] = {**loop.counters.as_dict(), **loop.telemetry.as_dict()}
        return Metrics(
            **counted,
            running=loop.scheduler.running,
            waiting=loop.scheduler.waiting,
            tokens_per_second=loop.telemetry.tokens.per_second(),
            executor=self.executor.measures(),
        )

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def _open(self, tasks: TaskSet) -> None:
        self._operations.open()
        self._engine_loop.start()
        tasks.start(self._engine_loop.wait_tasks(), name="engine_loop")

    async def start_async(self) -> None:
        """Start the executor's agents and the tasks; requests are served when this returns.

        A profile that was going on when the engine was stopped is dropped.
        """
        await self._settle()
        is_new = not self.running
        if is_new:
            self._operations.check_ranks()
            await self._engine_loop.start_async()
        self.start()
        if is_new and self._is_profiled:
            await self.discard_profile_async()

    async def _close(self) -> None:
        await self._engine_loop.stop_async()

    def stop(self) -> None:
        """End the tasks and stop the ranks' agents; every pending request hears of it.

        On the thread of the engine's loop this is a request, and `wait_tasks` ends when it is done. From any other
        thread it blocks until then, bounded by the stop timeout.

        Raises:
            TimeoutError: The engine's loop did not get to it.
        """
        self._stop_within(self._stop_timeout + _LOOP_PATIENCE_S)

    def release(self) -> None:
        """Free the ranks; blocks up to the stop timeout. Works in any state, twice, and after a failure."""
        self.stop()
        self._engine_loop.release()

    async def release_async(self) -> None:
        """As `release`, without blocking the loop."""
        try:
            await self.stop_async()
        finally:
            await self._engine_loop.release_async()
