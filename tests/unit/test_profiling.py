"""Merging the traces of ranks into one."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpexec.engine.profiling import check_file, merge, profiling, write_trace
from mpexec.errors import ConfigError


def trace(base: int, pid: int, ts: float) -> dict[str, Any]:
    return {
        "baseTimeNanoseconds": base,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": pid, "args": {"name": "main"}},
            {"ph": "X", "name": "aten::mm", "pid": pid, "tid": pid, "ts": ts, "dur": 1.0},
            {"ph": "s", "name": "ac2g", "id": 3, "pid": pid, "tid": pid, "ts": ts},
        ],
    }


def test_each_rank_is_a_process_row_with_its_name_and_the_clocks_agree() -> None:
    merged = merge([trace(1_000_000, 77, 5.0), trace(3_000_000, 78, 5.0)], [77, 78])
    events = merged["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0 (pid 77)", 1: "rank 1 (pid 78)"}
    assert [event["ts"] for event in events if event["name"] == "aten::mm"] == [5.0, 2005.0]
    assert merged["baseTimeNanoseconds"] == 1_000_000
    arrows = {event["id"] for event in events if event["ph"] == "s"}
    assert len(arrows) == 2


def test_a_trace_is_written_whole_and_compressed_where_its_name_says_so(tmp_path: Path) -> None:
    raw = json.dumps(trace(0, 7, 1.0)).encode()
    for name in ("trace.json", "trace.json.gz"):
        write_trace(tmp_path / name, [raw], [7])
    plain = (tmp_path / "trace.json").read_bytes()
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == plain
    assert len(json.loads(plain)["traceEvents"]) == 5
    assert sorted(os.listdir(tmp_path)) == ["trace.json", "trace.json.gz"]


@pytest.mark.parametrize(
    "path",
    ["", "missing/trace.json", "file/trace.json", "pipe", "circle", "/dev/null", "/proc/trace.json", "n" * 256, "\0"],
)
def test_a_place_where_no_file_can_be_is_refused_before_anything_is_profiled(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match="cannot be written"):
        check_file(tmp_path / path)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("path", [None, 5, b"trace.json"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match="names no file"):
        check_file(path)


def test_a_link_is_followed_and_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    (tmp_path / "link").symlink_to(target)
    for _ in range(2):
        write_trace(check_file(tmp_path / "link"), [json.dumps(trace(0, 7, 1.0)).encode()], [7])
    assert (tmp_path / "link").is_symlink()
    assert len(json.loads(target.read_bytes())["traceEvents"]) == 5
    assert len(os.listdir(tmp_path)) == 2


class Recorded:
    """An engine that notes what it is asked for, and cannot stop."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def start_profile_async(self, *, record_shapes: bool = False, with_stack: bool = False) -> None:
        self.asked.append(("start", record_shapes, with_stack))

    async def stop_profile_async(self, path: str | Path) -> Path:
        self.asked.append("stop")
        raise OSError("disk full")


async def test_the_error_of_the_block_comes_before_that_of_the_writing(tmp_path: Path) -> None:
    engine = Recorded()
    with pytest.raises(ZeroDivisionError) as caught:
        async with profiling(engine, tmp_path / "t.json", with_stack=True):
            raise ZeroDivisionError
    assert engine.asked == [("start", False, True), "stop"]
    assert "disk full" in str(caught.value.__notes__)
    with pytest.raises(OSError, match="disk full"):
        async with profiling(engine, tmp_path / "t.json"):
            pass


async def test_a_profile_that_is_cancelled_while_it_begins_is_ended(tmp_path: Path) -> None:
    class Slow(Recorded):
        async def start_profile_async(self, *, record_shapes: bool = False, with_stack: bool = False) -> None:
            self.asked.append("start")
            await asyncio.Event().wait()

    async def profile() -> None:
        async with profiling(engine, tmp_path / "t.json"):
            raise AssertionError("it has not begun")

    engine = Slow()
    task = asyncio.create_task(profile())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.asked == ["start", "stop"]


async def test_nothing_is_started_for_a_file_that_cannot_be(tmp_path: Path) -> None:
    engine = Recorded()
    with pytest.raises(ConfigError):
        async with profiling(engine, tmp_path):
            pass
    assert engine.asked == []
