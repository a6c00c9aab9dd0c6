"""Operations on two ranks of the real model: what it writes before and after, and what a profile shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from mpexec import BlockingEngine, ConfigError, Engine, EngineConfig, SamplingParams
from mpexec.engine.prometheus import prometheus_text
from mpexec.models import default_model_path

TEXT = "In the beginning God created"


@pytest.fixture(scope="module")
def engine() -> Iterator[BlockingEngine]:
    """Two ranks of the bundled model."""
    config = EngineConfig(max_length=128, max_slots=2)
    with BlockingEngine(Engine.from_pretrained(tp=2, config=config, start_method="forkserver")) as engine:
        yield engine


def write(engine: BlockingEngine) -> list[int]:
    pieces = engine.generate(TEXT, SamplingParams(max_new_tokens=8, ignore_eos=True))
    return [token for piece in pieces for token in piece.token_ids]


def cache_nbytes(engine: BlockingEngine) -> list[int]:
    executor = engine._engine.executor
    return [facts["cache_nbytes"] for facts in executor.collective_rpc("model_facts")]


def weights() -> dict[str, Any]:
    (file,) = default_model_path().glob("*.safetensors")
    return load_file(file)


def test_ranks_that_sleep_have_no_cache_and_write_the_same_after_the_wakeup(engine: BlockingEngine) -> None:
    before, held = write(engine), cache_nbytes(engine)
    engine.sleep()
    assert cache_nbytes(engine) == [0, 0]
    engine.wakeup()
    assert cache_nbytes(engine) == held
    assert write(engine) == before


def test_a_level_of_sleep_that_the_model_does_not_know_is_refused(engine: BlockingEngine) -> None:
    with pytest.raises(ConfigError, match="use 1"):
        engine.sleep(2)
    assert engine.health().state == "running"


def test_other_weights_write_other_tokens_and_the_old_ones_from_their_file_the_old(
    engine: BlockingEngine, tmp_path: Path
) -> None:
    before = write(engine)
    other = {name: tensor * 0.5 if "mlp" in name else tensor for name, tensor in weights().items()}
    engine.update_params(other)
    changed = write(engine)
    assert changed != before
    engine.update_params(default_model_path())
    assert write(engine) == before
    save_file(other, tmp_path / "other.safetensors")
    engine.update_params(tmp_path / "other.safetensors", drain=False)
    assert write(engine) == changed
    engine.sleep()  # what was changed stays so
    engine.wakeup()
    assert write(engine) == changed
    engine.update_params(weights())
    assert write(engine) == before


def test_weights_of_another_model_are_refused_and_the_old_ones_serve_on(engine: BlockingEngine) -> None:
    before = write(engine)
    with pytest.raises((ConfigError, ValueError)):
        engine.update_params({name + "x": tensor for name, tensor in weights().items()})
    assert write(engine) == before


def test_a_profile_shows_the_operators_of_both_ranks_side_by_side_on_one_clock(
    engine: BlockingEngine, tmp_path: Path
) -> None:
    with engine.profile(tmp_path / "trace.json") as file:
        write(engine)
        with pytest.raises(ConfigError, match="being profiled already"), engine.profile(tmp_path / "second.json"):
            pass
    events = json.loads(file.read_text())["traceEvents"]
    pids = engine._engine.rank_pids
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank} (pid {pid})" for rank, pid in enumerate(pids)}
    spans = []
    for rank in range(2):
        ops = [event for event in events if event["pid"] == rank and event.get("cat") == "cpu_op"]
        assert {"aten::mm", "aten::embedding"} & {op["name"] for op in ops}
        spans.append((min(op["ts"] for op in ops), max(op["ts"] + op["dur"] for op in ops)))
    # They run the same steps, and wait for each other in each layer.
    assert abs(spans[0][1] - spans[1][1]) < 0.2 * (spans[0][1] - spans[0][0]) + 100_000
    assert not (tmp_path / "second.json").exists()
    with pytest.raises(ConfigError, match="not being profiled"):
        engine._await(engine._engine.stop_profile_async(file))


def test_the_text_for_prometheus_has_every_histogram(engine: BlockingEngine) -> None:
    write(engine)
    metrics = engine.metrics()
    families = {family.name: family for family in text_string_to_metric_families(prometheus_text(metrics))}
    for name in ("queue_wait", "time_to_first_token", "inter_token", "request", "step"):
        samples = {sample.name: sample for sample in families[f"mpexec_{name}_seconds"].samples}
        assert samples[f"mpexec_{name}_seconds_count"].value > 0
        assert samples[f"mpexec_{name}_seconds_bucket"].value == samples[f"mpexec_{name}_seconds_count"].value  # +Inf
    ranks = {
        (sample.labels["rank"], sample.labels["method"])
        for sample in families["mpexec_method_seconds"].samples
        if sample.name.endswith("_count")
    }
    assert {("0", "forward"), ("1", "forward"), ("1", "sleep")} <= ranks
    assert {sample.labels["who"] for sample in families["mpexec_waits_parked"].samples} == {
        "driver",
        "rank 0",
        "rank 1",
    }
