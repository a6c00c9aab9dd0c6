"""The gloo group of the ranks: torch's own in every respect, except that its thread sleeps longer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mpexec import Executor, ModelAgent, WorkerSpec, build_executor
from mpexec.transport.linux import timer_slack
from mpexec.worker.gloo import _patient_options, patient_devices


def wakes_of_other_threads() -> int:
    """How often threads of this process other than the main one have gone to sleep so far."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(os.getpid()):
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            count += int(fields["voluntary_ctxt_switches"])
    return count


class Member(ModelAgent):
    """Looks at the process group from inside."""

    def about(self) -> tuple[str, str, bool]:
        import torch
        import torch.distributed as dist
        from torch.distributed import ProcessGroupGloo

        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        return dist.get_backend(), type(backend).__name__, isinstance(backend, ProcessGroupGloo)

    def reduce(self, own_group: bool) -> float:
        import torch
        import torch.distributed as dist

        group = dist.new_group() if own_group else None
        tensor = torch.ones(3) * (self.rank + 1)
        dist.all_reduce(tensor, group=group)
        if group is not None:
            dist.destroy_process_group(group)
        return float(tensor.sum())

    def wakes_per_second(self) -> float:
        before, began = wakes_of_other_threads(), time.monotonic()
        time.sleep(1.0)
        return (wakes_of_other_threads() - before) / (time.monotonic() - began)

    def slack(self) -> int:
        return int(Path("/proc/self/timerslack_ns").read_text())


@pytest.fixture(scope="module")
def members() -> Iterator[Executor]:
    spec = WorkerSpec(agent=Member, world_size=2, start_method="forkserver")
    with build_executor(spec) as executor:
        yield executor


def test_the_group_is_gloo_to_everybody_who_asks(members: Executor) -> None:
    assert members.collective_rpc("about") == [("gloo", "ProcessGroupGloo", True)] * 2


@pytest.mark.parametrize("own_group", [False, True])
def test_collectives_work_in_it_and_in_groups_made_later(members: Executor, own_group: bool) -> None:
    assert members.collective_rpc("reduce", args=(own_group,)) == [9.0, 9.0]


def test_its_threads_sleep_while_nobody_talks(members: Executor) -> None:
    """torch's own device wakes a hundred times a second; a busy machine can only make it fewer."""
    assert max(members.collective_rpc("wakes_per_second")) < 50


def test_the_slack_of_the_rank_itself_is_as_it_was(members: Executor) -> None:
    assert members.collective_rpc("slack") == [int(Path("/proc/self/timerslack_ns").read_text())] * 2


def test_slack_is_given_back_also_after_an_error() -> None:
    before = Path("/proc/self/timerslack_ns").read_text()
    with pytest.raises(KeyError), timer_slack(5_000_000):
        assert Path("/proc/self/timerslack_ns").read_text() == "5000000\n"
        raise KeyError
    assert Path("/proc/self/timerslack_ns").read_text() == before


@pytest.mark.parametrize("interface", ["", "l", "lo,", "lo,lo"])
def test_what_torch_reads_otherwise_is_left_to_torch(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import ProcessGroupGloo

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    assert _patient_options(ProcessGroupGloo, timeout=timedelta(seconds=9)) is None


def test_one_interface_gets_one_patient_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import ProcessGroupGloo

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    options = _patient_options(ProcessGroupGloo, timeout=timedelta(seconds=9))
    assert len(options._devices) == 1
    assert options._timeout == timedelta(seconds=9)
    assert _patient_options(ProcessGroupGloo, timeout=timedelta(seconds=9), pg_options=None) is None


def test_a_torch_of_another_shape_makes_its_groups_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.distributed_c10d as c10d

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made: list[Any] = []

    class OtherGloo:
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append((args, options))

    monkeypatch.setattr(c10d, "ProcessGroupGloo", OtherGloo)
    with patient_devices():
        c10d.ProcessGroupGloo("store", 0, 2, timeout=timedelta(seconds=9))
    assert made == [(("store", 0, 2), {"timeout": timedelta(seconds=9)})]
    assert c10d.ProcessGroupGloo is OtherGloo
    monkeypatch.delattr(c10d, "ProcessGroupGloo")
    with patient_devices():
        assert not hasattr(c10d, "ProcessGroupGloo")
