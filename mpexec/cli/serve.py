"""`mpexec serve`."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import click

from mpexec.cli.interrupt import run_interruptibly, stop_on_signals
from mpexec.cli.options import find_model, model_options
from mpexec.cli.report import tell
from mpexec.cli.values import Number
from mpexec.config import EngineConfig
from mpexec.errors import ConfigError

if TYPE_CHECKING:
    import socket

_LIMITS = EngineConfig()
_STOP_TIMEOUT_S = 1.0  # a supervisor waits for the exit, whatever a rank is doing
_FAILED_PATIENCE_S = 1.0  # for the clean-up after a failure, which the ranks have not survived anyway


@click.command(
    "serve",
    epilog="""\b
Examples:
  mpexec serve --port 8000
  mpexec serve --model ~/models/Qwen3-0.6B --tp 4 --served-model-name qwen3
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"prompt": "In the beginning", "max_tokens": 20}'
\b
Routes: POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics.
\b
Exit codes: 0 stopped by Ctrl-C or SIGTERM with all requests answered, 1 a rank or the engine failed (open requests
have been told), 2 bad input or a port that is taken (no rank was started), 130 and 143 Ctrl-C and SIGTERM while
loading, or a second one while requests were still running.""",
)
@model_options
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 is every network of this machine. There is no authentication.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes any that is free.",
)
@click.option(
    "--served-model-name",
    metavar="NAME",
    help="The model's name in requests and answers. Default: the name of its folder.",
)
@click.option(
    "--max-slots",
    type=click.IntRange(min=1),
    default=_LIMITS.max_slots,
    show_default=True,
    help="Requests that are computed together.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(min=1),
    default=_LIMITS.max_queue,
    show_default=True,
    help="Requests that may wait; one more is answered with 429.",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=2),
    help="Most tokens of prompt and answer together. Default: what the model allows, at most 4096.",
)
@click.option(
    "--drain-timeout",
    type=Number(),
    default=30.0,
    show_default=True,
    help="Seconds that running requests may take after Ctrl-C or SIGTERM. A second signal ends them at once.",
)
@click.option(
    "--stall-timeout",
    type=Number(),
    default=120.0,
    show_default=True,
    help="Seconds without a step of the model, while requests run, after which /health is 503; 0 for never.",
)
def command(model: str | None, host: str, port: int, verbose: bool, **options: Any) -> None:
    """Serve a language model over HTTP, with OpenAI's API.

    One line on stderr says where, as soon as requests are taken. If a rank fails, open requests are answered with
    the error, and the command ends with exit code 1 for a supervisor to start it again.
    """
    try:
        import jinja2  # noqa: F401 - asked for here, to say what to install
        import msgspec  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{error.name or error} is not installed, and serve needs it: pip install 'mpexec[serve]'"
        ) from error
    from mpexec.http.server import bind

    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    with bind(host, port) as sock:
        run_interruptibly(_serve_async(sock, find_model(model), verbose=verbose, **options))


async def _serve_async(
    sock: socket.socket,
    model: str | None,
    *,
    tp: int,
    dtype: str,
    device: str,
    max_slots: int,
    max_queue: int,
    max_length: int | None,
    start_method: Any,
    served_model_name: str | None,
    stall_timeout: float,
    drain_timeout: float,
    verbose: bool,
) -> None:
    """Load, serve, and free everything.

    Raises:
        ConfigError: Found before any rank starts.
        StartupError: A rank did not become ready.
        ToldError: A rank or the engine failed later; the message has been printed.
    """
    from mpexec.cli.loading import ending, loading_progress
    from mpexec.engine.engine import ModelPlan
    from mpexec.http.served import ServedModel, make_engine
    from mpexec.http.server import HTTPServer, url_of

    # The choice of executor is this command's, not its user's.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="mpexec")
    config = EngineConfig(max_slots=max_slots, max_queue=max_queue, max_length=max_length, stop_timeout=_STOP_TIMEOUT_S)
    plan = ModelPlan.read(model, tp, config)
    served = ServedModel.read(plan, served_model_name)
    with loading_progress(served.name, tp):
        engine = await make_engine(
            plan.facts.path, tp, config=config, dtype=dtype, device=device, start_method=start_method
        )
    async with ending(engine, patience=_FAILED_PATIENCE_S, untold=(ConfigError,)):
        server = HTTPServer(engine, served, stall_timeout=stall_timeout, access_log=verbose)
        with stop_on_signals() as stop:
            await server.run_async(
                sock,
                stop,
                drain_timeout=drain_timeout,
                on_ready=lambda: tell(f"serving {served.name} on {url_of(sock)}"),
            )
