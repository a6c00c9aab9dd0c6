"""Operations of an engine: values that cannot work are refused by name, before anything is done."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpexec.engine.engine import Engine
from mpexec.engine.operations import Operations, drain_seconds
from mpexec.errors import ConfigError
from mpexec.mp_engine.engine_client import EngineClient
from mpexec.mp_engine.frames import encode_arguments

BAD: list[tuple[str, dict[str, Any]]] = [
    *(("sleep_async", {"drain_timeout": bad}) for bad in ("5", -1.0, math.nan, True, object())),
    *(("sleep_async", {"level": bad}) for bad in ("deep", True, -1, 10**20, 1.5)),
    *(("update_params_async", {"weights": "model", "drain_timeout": bad}) for bad in ("5", object())),
    *(("update_params_async", {"weights": "model", "drain": bad}) for bad in ("no", None)),
    *(("update_params_async", {"weights": bad}) for bad in (None, b"model")),
    *(("start_profile_async", {"record_shapes": bad}) for bad in ("yes", 1)),
    *(("stop_profile_async", {"path": bad}) for bad in (None, 5, "\0", "missing/trace.json")),
]


@pytest.fixture
def in_process() -> Engine:
    """One that can do nothing: what is not refused raises something else."""
    engine = Engine.__new__(Engine)
    engine._operations = Operations(cast(Any, None), cast(Any, None), cast(Any, None), None)
    return engine


@pytest.mark.parametrize("method, arguments", BAD)
async def test_an_operation_with_a_bad_value_is_refused_by_its_name(
    in_process: Engine, method: str, arguments: dict[str, Any]
) -> None:
    name = "profile|names no file" if "path" in arguments else list(arguments)[-1]
    with pytest.raises(ConfigError, match=name):
        await getattr(in_process, method)(**arguments)


@pytest.mark.parametrize("method, arguments", BAD)
async def test_what_is_refused_in_process_is_refused_by_a_client_or_can_be_told_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, method: str, arguments: dict[str, Any]
) -> None:
    sent: list[Any] = []

    async def call(*args: Any, **kwargs: Any) -> str:
        sent.append(encode_arguments(args, kwargs))
        return ""

    client = EngineClient("ipc:///nowhere")
    monkeypatch.setattr(client, "_usable_client", lambda: SimpleNamespace(call=call))
    try:
        await getattr(client, method)(**arguments)
    except ConfigError:
        assert not sent
    else:
        assert sent


def test_a_time_without_end_is_none() -> None:
    assert [drain_seconds(one) for one in (None, math.inf, 10**400, 5, 0.0)] == [None, None, None, 5.0, 0.0]
