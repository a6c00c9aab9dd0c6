"""One chrome trace of all ranks, side by side: a process row for each, on one clock."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from mpexec.engine.files import absolute, is_writable, write_whole
from mpexec.errors import ConfigError

_ID_SPAN = 1 << 36  # ids of one rank's arrows are below it


class Profiled(Protocol):
    """An engine whose ranks can be profiled."""

    async def start_profile_async(self, *, record_shapes: bool = False, with_stack: bool = False) -> None: ...

    async def stop_profile_async(self, path: str | Path) -> Path: ...


@asynccontextmanager
async def profiling(engine: Profiled, path: str | Path, **options: bool) -> AsyncIterator[Path]:
    """Profile for as long as the block lasts. An error of the block is not hidden by one of the writing."""
    file = check_file(path)
    try:
        await engine.start_profile_async(**options)
    except asyncio.CancelledError:
        # The ranks begin all the same, and would record for ever; calls keep their order, so this ends it.
        with suppress(Exception):
            await engine.stop_profile_async(file)
        raise
    try:
        yield file
    except BaseException as error:
        try:
            await engine.stop_profile_async(file)
        except Exception as failed:  # the engine may have failed, and the block's error says why
            error.add_note(f"no profile was written: {type(failed).__name__}: {failed}")
        raise
    await engine.stop_profile_async(file)


def check_file(path: str | Path) -> Path:
    """The absolute path of a file that can be written, of links that to which they lead.

    Raises:
        ConfigError: Its folder is not there or cannot be written to, or what is there already is no regular file.
    """
    file = absolute(path)
    if not is_writable(file):  # what is found out later is too late
        raise ConfigError(
            f"a profile cannot be written to {str(path)!r}: name a file in a folder that is there and writable"
        )
    return file


def write_trace(file: Path, traces: Sequence[bytes], pids: Sequence[int]) -> None:
    """Merge the ranks' traces and write them, compressed if the name ends in `.gz`; whole or not at all.

    Args:
        file: Where to.
        traces: What `stop_profile` gave on each rank.
        pids: Of the ranks' processes.

    Raises:
        OSError: It cannot be written.
    """
    content = json.dumps(merge([json.loads(trace) for trace in traces], pids), separators=(",", ":")).encode()
    if file.suffix == ".gz":
        content = gzip.compress(content, compresslevel=3)
    write_whole(file, content)


def merge(traces: Sequence[Mapping[str, Any]], pids: Sequence[int]) -> dict[str, Any]:
    """One trace whose process numbers are the ranks; devices of a rank are threads of its row."""
    bases = [trace.get("baseTimeNanoseconds", 0) for trace in traces]
    base = min(bases)
    events: list[dict[str, Any]] = []
    for rank, (trace, pid) in enumerate(zip(traces, pids, strict=True)):
        events += _row(rank, pid)
        shift = (bases[rank] - base) / 1000  # to microseconds
        events += [
            _moved(event, rank, shift)
            for event in trace["traceEvents"]
            if not (event.get("ph") == "M" and str(event.get("name", "")).startswith("process_"))
        ]
    devices = [device for trace in traces for device in trace.get("deviceProperties", ())]
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "deviceProperties": devices,
        "traceEvents": events,
    }


def _row(rank: int, pid: int) -> list[dict[str, Any]]:
    named = {"process_name": {"name": f"rank {rank} (pid {pid})"}, "process_sort_index": {"sort_index": rank}}
    return [{"ph": "M", "name": name, "pid": rank, "tid": 0, "args": args} for name, args in named.items()]


def _moved(event: dict[str, Any], rank: int, shift: float) -> dict[str, Any]:
    event["pid"] = rank
    if "ts" in event:
        event["ts"] += shift
    if isinstance(event.get("id"), int):  # of arrows; those of another rank have the same numbers
        event["id"] += rank * _ID_SPAN
    return event
