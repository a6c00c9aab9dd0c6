"""A model that a command is to load, checked before any rank starts, and the loading itself."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from mpexec.cli.interrupt import end_process_in
from mpexec.cli.progress import ProgressLine, progress
from mpexec.cli.report import ReaderGoneError, StalledError, ToldError, complain, describe_failure
from mpexec.cli.stall import watching
from mpexec.config import EngineConfig, StartMethod
from mpexec.engine.engine import Engine, ModelPlan
from mpexec.errors import ConfigError
from mpexec.executor import choose_backend

STOP_TIMEOUT_S = 1.0  # after a failure has been told, the prompt must be back within two seconds
_FAILED_PATIENCE_S = 1.5

_starting = logging.getLogger("mpexec.executor.starting")
AnyEngine = Any  # an `Engine`, or a `ZMQEngine`, which has its face and needs an extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a model is to be loaded.

    Attributes:
        executor: "mp" or "ray".
        max_length: Most tokens of prompt and answer together, as the user has it; None for what the model allows.
        stall_timeout: Seconds without a step of the model after which the command ends; 0 for never.
    """

    plan: ModelPlan
    executor: str
    ray_address: str | None
    start_method: StartMethod
    verbose: bool
    dtype: str = "float32"
    device: str = "auto"
    engine_process: bool = False
    max_length: int | None = None
    stall_timeout: float = 0.0

    @classmethod
    def prepare(
        cls,
        model: str | None,
        tp: int,
        *,
        executor: str,
        device: str = "auto",
        max_length: int | None = None,
        **options: Any,
    ) -> Loading:
        """Check the model, and that there is an executor for it.

        Raises:
            ConfigError: Names the value and the remedy.
        """
        plan = ModelPlan.read(model, tp, EngineConfig(max_length=max_length))
        if max_length is None:  # the cache is made for the requests, which are known
            plan = replace(plan, max_length=plan.facts.longest)
        executor = choose_executor(plan, executor, device)
        return cls(plan=plan, executor=executor, device=device, max_length=max_length, **options)

    def room_for(self, tokens: int) -> int:
        """Tokens that a slot is to have room for, if no text needs more than so many."""
        return self.max_length or min(tokens, self.plan.max_length)

    @asynccontextmanager
    async def engine_async(
        self, config: EngineConfig, tell: Callable[[str], None] = complain
    ) -> AsyncIterator[AnyEngine]:
        """Load the model and start its engine for the block; the ranks have been released when this returns or raises.

        Args:
            config: Limits of the engine.
            tell: Takes a line for the user when the steps of the model do not end, while the block runs.

        Raises:
            StartupError: A rank did not become ready.
            ToldError: The engine failed or stalled later, or the block raised; the message has been printed.
        """
        # The choice of executor below is this command's, not its user's.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="mpexec")
        if self.verbose:
            logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        with self._quiet_stdout():
            engine = await self._load_async(config)
            async with ending(engine, patience=_FAILED_PATIENCE_S, untold=(ReaderGoneError, OSError)):
                await engine.start_async()
                self._tell_pids(engine)
                async with watching(engine, self.stall_timeout, tell):
                    yield engine

    async def _load_async(self, config: EngineConfig) -> AnyEngine:
        path, tp = self.plan.facts.path, self.plan.tp
        with loading_progress(path.name, tp, is_told=True):
            return await engine_class(own_process=self.engine_process).from_pretrained_async(
                path, tp, config=config, **self._executor_options()
            )

    def _executor_options(self) -> dict[str, Any]:
        """What the engine's executor is made of."""
        options = {"backend": self.executor, "dtype": self.dtype, "device": self.device}
        if self.executor == "mp":
            return {**options, "start_method": self.start_method}
        return {**options, "address": self.ray_address}

    @contextmanager
    def _quiet_stdout(self) -> Iterator[None]:
        """Keep off stdout what Ray says there, which belongs to the answers; a failure's facts are in its error."""
        if self.executor != "ray":
            yield
            return
        os.environ.setdefault("RAY_LOG_TO_DRIVER", "1" if self.verbose else "0")
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stderr if self.verbose else nowhere):
            yield

    def _tell_pids(self, engine: AnyEngine) -> None:
        if self.verbose:
            nodes = engine.rank_nodes
            for rank, pid in enumerate(engine.rank_pids):
                complain(f"rank {rank} is process {pid}" + (f" on node {nodes[rank]}" if nodes else ""))


@asynccontextmanager
async def ending(engine: AnyEngine, *, patience: float, untold: tuple[type[Exception], ...]) -> AsyncIterator[None]:
    """Stop and release a loaded engine after the block, which starts it; a failure of the block is told before.

    Args:
        engine: Its ranks have been released when this returns or raises.
        patience: Seconds that this may take after a failure, twice as many after a stall; then the process ends, with
            exit code 1.
        untold: Exceptions that pass as they are: they do not come from the engine, and somebody else tells of them.

    Raises:
        ToldError: The block raised another exception; the message has been printed.
    """
    try:
        yield
    except untold:
        raise
    except Exception as failure:
        # Told before the clean-up, and the clean-up is bounded: a rank that hangs must not delay either.
        # One that is known to hang takes the whole ladder, and whoever has waited for that long a moment more.
        end_process_in(2 * patience if isinstance(failure, StalledError) else patience, 1)
        complain(describe_failure(failure))
        raise ToldError(1) from failure
    finally:
        try:
            await engine.stop_async()
        finally:
            await engine.release_async()


@contextmanager
def loading_progress(model: str, tp: int, *, is_told: bool = False) -> Iterator[None]:
    """Show that a model is being loaded, and what its ranks report of it while this process starts them.

    Where nobody could see that, `is_told` has one line say the former.
    """
    text = f"loading {model} on {tp} {'rank' if tp == 1 else 'ranks'}"
    with progress(text) as line:
        if not line.is_shown:
            if is_told:
                complain(text)
            yield
            return
        news = _News(line, text)
        level = _starting.level
        _starting.addHandler(news)
        _starting.setLevel(logging.INFO)
        try:
            yield
        finally:
            _starting.setLevel(level)
            _starting.removeHandler(news)


class _News(logging.Handler):
    """Puts what is logged of a start, "rank 1: build model", onto the line."""

    def __init__(self, line: ProgressLine, text: str) -> None:
        super().__init__(logging.INFO)
        self._line = line
        self._text = text

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        self._line.update(f"{self._text}, {record.getMessage()}")


def engine_class(*, own_process: bool) -> Any:
    """The engine to load a model with.

    Raises:
        ConfigError: An engine in a process of its own needs packages that are not installed.
    """
    if not own_process:
        return Engine
    try:
        from mpexec.mp_engine.zmq_engine import ZMQEngine
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'mpexec[zmq]'") from error
    return ZMQEngine


def choose_executor(plan: ModelPlan, asked: str, device: str) -> str:
    """The executor for a model: "mp" or "ray".

    Raises:
        ConfigError: It is Ray's, and Ray is not installed.
    """
    chosen, why = choose_backend(plan.worker_spec(EngineConfig(), device=device), asked)
    if chosen != "ray":
        return "mp"  # processes also for one rank: importing torch here would hold up Ctrl-C
    if find_spec("ray") is None:
        raise ConfigError(
            f"Ray is not installed, and --executor is ray ({why}): pip install 'mpexec[ray]', or use --executor mp"
        )
    return chosen
