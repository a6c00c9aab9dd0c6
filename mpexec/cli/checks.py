"""The judgements of `mpexec doctor`: each takes facts and gives findings, with the remedy where one is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mpexec.cli.machine import Cores, Memory

Status = Literal["ok", "warn", "fail"]

_OLDEST_KERNEL = (5, 3)
_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 6)
_FEW_DESCRIPTORS = 1024  # an executor takes about nine for each rank, a program with sockets many more
_TOO_FEW_DESCRIPTORS = 128
_LITTLE_MEMORY = 2 << 30  # two ranks that have imported torch, and a small model
_TOO_LITTLE_MEMORY = 512 << 20
_SLOW_CALL_US = 1000.0
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "hf": ("transformers", "accelerate", "safetensors", "tokenizers"),
    "cli": ("click", "rich"),
    "plot": ("matplotlib",),
    "zmq": ("pyzmq", "msgspec"),
    "serve": ("starlette", "uvicorn", "jinja2", "prometheus_client"),
    "ray": ("ray",),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        status: "ok"; "warn" where something is slower or missing; "fail" where mpexec does not work.
        text: What is the case.
        remedy: What to do about it; empty where nothing is.
    """

    name: str
    status: Status
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def check_kernel(release: str, probes: Mapping[str, Callable[[], None]]) -> list[Finding]:
    """Whether the kernel is new enough, and allows each call that mpexec stands on."""
    version = _numbers(release)
    found = [
        Finding("kernel", "ok", f"Linux {release}")
        if version >= _OLDEST_KERNEL
        else Finding("kernel", "fail", f"Linux {release}", "mpexec needs Linux 5.3 or newer")
    ]
    for name, probe in probes.items():
        try:
            probe()
        except Exception as refused:  # whatever a sandbox makes of it
            remedy = "a sandbox may forbid it: use a seccomp profile that allows the call, as Docker's default does"
            found.append(Finding(name, "fail", str(refused) or type(refused).__name__, remedy))
        else:
            found.append(Finding(name, "ok", "works"))
    return found


def check_cores(cores: Cores) -> Finding:
    """Whether two ranks and the driver can run at the same time."""
    text = f"{cores.usable} of {cores.total} cores may be used"
    if cores.quota is not None:
        text += f", at most {cores.quota:g} at a time (control group)"
    if min(cores.usable, cores.quota or cores.usable) < 2:
        return Finding(
            "cores",
            "warn",
            text,
            "two ranks take turns on one core, so calls are slow: give the process two cores or more "
            "(taskset, docker --cpus)",
        )
    if cores.quota is not None and cores.quota < cores.usable:
        return Finding(
            "cores",
            "warn",
            text,
            f"threads are sized by the {cores.usable} cores: give executors threads=N so that ranks times N is at "
            f"most {max(1, int(cores.quota))}, else the kernel holds them up",
        )
    return Finding("cores", "ok", text)


def check_memory(memory: Memory) -> Finding:
    """Whether two ranks that have imported torch fit."""
    available = memory.available if memory.limit is None else min(memory.available, memory.limit)
    text = f"{_size(available)} available of {_size(memory.total)}"
    if memory.limit is not None and memory.limit < memory.total:
        text += f", limit {_size(memory.limit)} (control group)"
    if available < _TOO_LITTLE_MEMORY:
        return Finding("memory", "fail", text, "a rank needs about 300 MB before its model: free some, or raise it")
    if available < _LITTLE_MEMORY:
        return Finding("memory", "warn", text, "enough for a small model on two ranks; the kernel ends larger ones")
    return Finding("memory", "ok", text)


def check_descriptors(soft: int, hard: int) -> Finding:
    """Whether a driver may open the descriptors of its ranks."""
    infinite = -1
    shown = [("unlimited" if limit == infinite else str(limit)) for limit in (soft, hard)]
    text = f"RLIMIT_NOFILE {shown[0]}, may be raised to {shown[1]}"
    if soft != infinite and soft < _TOO_FEW_DESCRIPTORS:
        return Finding("descriptors", "fail", text, "a driver needs about 9 for each rank: ulimit -n 4096")
    if soft != infinite and soft < _FEW_DESCRIPTORS:
        return Finding("descriptors", "warn", text, "enough for a few ranks; for more: ulimit -n 4096")
    return Finding("descriptors", "ok", text)


def check_versions(python: str, torch: Mapping[str, Any], installed: Mapping[str, str | None]) -> list[Finding]:
    """Python, torch, and the extras with what each of them lacks."""
    found = [
        Finding("python", "ok", python)
        if _numbers(python) >= _OLDEST_PYTHON
        else Finding("python", "fail", python, "mpexec needs Python 3.11 or newer"),
        _check_torch(torch),
    ]
    for extra, names in EXTRAS.items():
        missing = [name for name in names if installed.get(name) is None]
        if missing:
            text = f"not installed: {', '.join(missing)}"
            found.append(Finding(f"extra {extra}", "warn", text, f"if you need it: pip install 'mpexec[{extra}]'"))
        else:
            found.append(Finding(f"extra {extra}", "ok", ", ".join(f"{name} {installed[name]}" for name in names)))
    return found


def _check_torch(torch: Mapping[str, Any]) -> Finding:
    if "error" in torch:
        return Finding("torch", "fail", torch["error"], "install it anew: pip install --force-reinstall 'torch>=2.6'")
    text = f"{torch['version']}, {'CUDA ' + torch['cuda'] if torch['cuda'] else 'without CUDA'}"
    if _numbers(torch["version"]) < _OLDEST_TORCH:
        return Finding("torch", "fail", text, "mpexec needs torch 2.6 or newer: pip install -U torch")
    if not torch["gloo"]:
        return Finding("torch", "fail", f"{text}, without gloo", "install a build of torch with gloo for Linux")
    return Finding("torch", "ok", text)


def check_gpus(torch: Mapping[str, Any], has_driver: bool) -> Finding:
    """Which GPUs the ranks will find."""
    devices = torch.get("devices", [])
    if devices:
        shown = [f"{device['name']} ({_size(device['free'])} of {_size(device['total'])} free)" for device in devices]
        return Finding("GPUs", "ok", "; ".join(shown))
    if has_driver:
        return Finding(
            "GPUs",
            "warn",
            "the kernel has a GPU driver, but torch sees no device",
            "install a torch build for the driver's CUDA version, and look at CUDA_VISIBLE_DEVICES",
        )
    return Finding("GPUs", "ok", "none: ranks run on the CPU, with gloo")


def check_round_trip(facts: Mapping[str, Any]) -> Finding:
    """Whether two ranks start, sum up with each other, and answer calls quickly."""
    if "error" in facts:
        return Finding("two ranks", "fail", facts["error"], facts.get("remedy") or "mend what fails above first")
    text = (
        f"started in {facts['start_s']:.1f} s, gloo all-reduce {'right' if facts['sum_is_right'] else 'wrong'}, "
        f"call and both replies in {facts['call_us']:.0f} µs (median)"
    )
    if not facts["sum_is_right"]:
        return Finding("two ranks", "fail", text, "torch.distributed adds up wrongly: install torch anew")
    if facts["call_us"] > _SLOW_CALL_US:
        return Finding("two ranks", "warn", text, "tens of µs are usual on free cores: look for other busy programs")
    return Finding("two ranks", "ok", text)


def _numbers(version: str) -> tuple[int, int]:
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return (*numbers, 0, 0)[:2]  # type: ignore[return-value]  # two of them, whatever the text was


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
