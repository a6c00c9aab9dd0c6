"""The judgements of `mpexec doctor`, from facts that are made up, and the reading of facts from folders made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpexec.cli import checks, doctor, machine, round_trip
from mpexec.cli.app import run
from mpexec.cli.checks import EXTRAS, Finding
from mpexec.cli.machine import Cores, Memory

GB = 1 << 30
TORCH = {"version": "2.13.0+cpu", "cuda": None, "gloo": True, "devices": []}
ALL_INSTALLED = {name: "1.0" for names in EXTRAS.values() for name in names}
ROUND_TRIP = {"start_s": 2.0, "call_us": 40.0, "sum_is_right": True}


def refused() -> None:
    raise OSError("Operation not permitted")


def status_of(*findings: Finding) -> list[str]:
    return [finding.status for finding in findings]


def test_every_kernel_call_works_here_and_one_that_is_refused_is_named_with_a_remedy() -> None:
    assert set(status_of(*checks.check_kernel(machine.kernel_release(), machine.PROBES))) == {"ok"}
    _, good, bad = checks.check_kernel("6.1.0", {"eventfd": lambda: None, "pidfd_open": refused})
    assert (good.name, good.status) == ("eventfd", "ok")
    assert (bad.name, bad.status, bad.text) == ("pidfd_open", "fail", "Operation not permitted")
    assert "seccomp" in bad.remedy


@pytest.mark.parametrize(
    "release, status", [("6.1.0-18-amd64", "ok"), ("5.3", "ok"), ("5.2.9", "fail"), ("odd", "fail")]
)
def test_an_old_kernel_fails(release: str, status: str) -> None:
    assert status_of(*checks.check_kernel(release, {})) == [status]


@pytest.mark.parametrize(
    "cores, status, words",
    [
        (Cores(8, 8, None), "ok", "8 of 8"),
        (Cores(8, 1, None), "warn", "taskset"),
        (Cores(8, 8, 1.5), "warn", "docker --cpus"),
        (Cores(64, 64, 4.0), "warn", "threads=N"),
        (Cores(8, 4, 4.0), "ok", "at most 4"),
    ],
)
def test_cores_and_the_quota_of_the_control_group(cores: Cores, status: str, words: str) -> None:
    finding = checks.check_cores(cores)
    assert finding.status == status
    assert words in finding.text + finding.remedy


@pytest.mark.parametrize(
    "memory, status",
    [
        (Memory(32 * GB, 16 * GB, None), "ok"),
        (Memory(32 * GB, GB, None), "warn"),
        (Memory(32 * GB, 16 * GB, GB), "warn"),
        (Memory(32 * GB, 16 * GB, GB // 4), "fail"),
    ],
)
def test_little_memory_is_a_warning_and_almost_none_a_failure(memory: Memory, status: str) -> None:
    finding = checks.check_memory(memory)
    assert finding.status == status
    assert bool(finding.remedy) == (status != "ok")
    assert ("control group" in finding.text) == (memory.limit is not None)


@pytest.mark.parametrize("soft, status", [(64, "fail"), (256, "warn"), (1024, "ok"), (-1, "ok")])
def test_a_low_limit_of_descriptors_names_the_command_that_raises_it(soft: int, status: str) -> None:
    finding = checks.check_descriptors(soft, 4096)
    assert finding.status == status
    assert (status == "ok") or "ulimit -n" in finding.remedy


def test_versions_that_are_too_old_or_missing() -> None:
    good = checks.check_versions("3.11.7", TORCH, ALL_INSTALLED)
    assert set(status_of(*good)) == {"ok"}
    python, torch, *extras = checks.check_versions("3.10.1", {**TORCH, "version": "2.5.1"}, {})
    assert status_of(python, torch) == ["fail", "fail"]
    assert set(status_of(*extras)) == {"warn"}
    assert {extra.remedy for extra in extras} == {f"if you need it: pip install 'mpexec[{name}]'" for name in EXTRAS}
    (_, broken, *_) = checks.check_versions("3.11.7", {"error": "ImportError: libtorch.so"}, {})
    assert (broken.status, broken.text) == ("fail", "ImportError: libtorch.so")
    (_, without, *_) = checks.check_versions("3.11.7", {**TORCH, "gloo": False}, {})
    assert (without.status, "gloo" in without.text) == ("fail", True)


def test_gpus_that_torch_does_not_see_are_a_warning() -> None:
    assert checks.check_gpus(TORCH, has_driver=False).status == "ok"
    assert "CUDA_VISIBLE_DEVICES" in checks.check_gpus(TORCH, has_driver=True).remedy
    seen = checks.check_gpus({**TORCH, "devices": [{"name": "H200", "free": 9e9, "total": 140e9}]}, has_driver=True)
    assert (seen.status, seen.text) == ("ok", "H200 (9.0 GB of 140.0 GB free)")


def test_the_round_trip_is_judged_by_its_sum_and_its_time() -> None:
    assert checks.check_round_trip(ROUND_TRIP).status == "ok"
    assert checks.check_round_trip({**ROUND_TRIP, "call_us": 5000.0}).status == "warn"
    assert checks.check_round_trip({**ROUND_TRIP, "sum_is_right": False}).status == "fail"
    failed = checks.check_round_trip({"error": "StartupError: rank 1"})
    assert (failed.status, failed.text, bool(failed.remedy)) == ("fail", "StartupError: rank 1", True)


def test_quota_and_limit_are_the_smallest_of_the_group_and_those_above(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    assert machine._cpu_quota(tmp_path, "outer/inner") is None
    assert machine._memory_limit(tmp_path, "outer/inner") is None
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "outer" / "cpu.max").write_text("250000 100000\n")
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "outer" / "memory.max").write_text("1000000\n")
    assert machine._cpu_quota(tmp_path, "outer/inner") == 2.5
    assert machine._memory_limit(tmp_path, "outer/inner") == 1_000_000


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Facts of a machine on which all is well, for a test to change."""
    facts: dict[str, Any] = {"torch": TORCH, "round trip": ROUND_TRIP, "cores": Cores(8, 8, None)}
    monkeypatch.setattr(machine, "read_torch", lambda: facts["torch"])
    monkeypatch.setattr(machine, "read_versions", lambda names: ALL_INSTALLED)
    monkeypatch.setattr(machine, "read_limits", lambda: (4096, 4096))
    monkeypatch.setattr(machine, "read_cores", lambda: facts["cores"])
    monkeypatch.setattr(machine, "read_memory", lambda: Memory(32 * GB, 16 * GB, None))
    monkeypatch.setattr(machine, "has_gpu_driver", lambda: False)
    monkeypatch.setattr(round_trip, "measure_round_trip", lambda: facts["round trip"])
    return facts


def test_the_exit_code_is_0_with_warnings_and_1_with_a_failure(
    faked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    faked["cores"] = Cores(8, 1, None)
    assert run(["doctor"]) == 0
    shown, told = capsys.readouterr()
    assert "warn  cores               1 of 8 cores may be used\n      → " in shown
    assert told == ""
    faked["round trip"] = {"error": "StartupError: no"}
    assert run(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-2] == "fail  two ranks           StartupError: no"


def test_json_is_one_object_a_line(faked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {tuple(line) for line in lines} == {("name", "status", "text", "remedy")}
    assert {line["status"] for line in lines} == {"ok"}
    assert lines[-1]["name"] == "two ranks"


def test_facts_that_cannot_be_read_are_a_warning_and_the_rest_follows(
    faked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "read_memory", refused)
    found = {finding.name: finding for finding in doctor._findings()}
    assert found["memory"].status == "warn"
    assert found["two ranks"].status == "ok"
