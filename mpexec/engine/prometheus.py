"""An engine's metrics as families of Prometheus; needs prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpexec.engine.metrics import Metrics
from mpexec.errors import ConfigError
from mpexec.executor.measures import Measures
from mpexec.histogram import Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# By field of the engine's metrics; Prometheus' own suffix for counters is added.
_COUNTERS = {
    "requests": ("mpexec_requests", "Requests taken, refused ones included."),
    "finished": ("mpexec_requests_finished", "Requests answered to the end."),
    "cancelled": ("mpexec_requests_cancelled", "Requests given up by the client."),
    "refused": ("mpexec_requests_refused", "Requests for which there was no room, or that cannot run."),
    "interrupted": ("mpexec_requests_interrupted", "Requests cut short by an operation, a stop or a failure."),
    "prompt_tokens": ("mpexec_prompt_tokens", "Tokens of all prompts."),
    "generated_tokens": ("mpexec_generated_tokens", "New tokens handed out."),
    "steps": ("mpexec_steps", "Steps of the model."),
}
_GAUGES = {
    "running": ("mpexec_requests_running", "Requests that have a slot now."),
    "waiting": ("mpexec_requests_waiting", "Requests that wait for a slot now."),
    "tokens_per_second": (
        "mpexec_tokens_per_second",
        "New tokens per second, of the last ten seconds at most.",
    ),
}
_HISTOGRAMS = {
    "queue_wait": ("mpexec_queue_wait_seconds", "From a request's arrival to the step that begins its prompt."),
    "time_to_first_token": ("mpexec_time_to_first_token_seconds", "From a request's arrival to its first token."),
    "inter_token": ("mpexec_inter_token_seconds", "Between two tokens of a request."),
    "end_to_end": ("mpexec_request_seconds", "From a request's arrival to its last token."),
    "step": ("mpexec_step_seconds", "Steps of the model as the driver sees them."),
}
_FIRST, _LAST = 13, 37  # buckets at each doubling from 8 us (2**13 ns) to 137 s


def prometheus_text(metrics: Metrics) -> str:
    """The metrics in Prometheus' text format, for programs that have their own way to be scraped.

    Raises:
        ConfigError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.registry import Collector
    except ModuleNotFoundError:
        raise ConfigError("prometheus_client is not installed: pip install 'mpexec[serve]'") from None

    class Once(Collector):
        """These very metrics."""

        def collect(self) -> Iterator[Metric]:
            """All families."""
            return families(metrics)

    registry = CollectorRegistry()
    registry.register(Once())
    return generate_latest(registry).decode()


def families(metrics: Metrics) -> Iterator[Metric]:
    """One family for each counter, gauge and histogram; what is not known has no samples."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    for field, (name, text) in _COUNTERS.items():
        yield CounterMetricFamily(name, text, value=getattr(metrics, field))
    for field, (name, text) in _GAUGES.items():
        yield GaugeMetricFamily(name, text, value=getattr(metrics, field))
    for field, (name, text) in _HISTOGRAMS.items():
        family = HistogramMetricFamily(name, text)
        _add(family, [], getattr(metrics, field))
        yield family
    yield from _of_executor(metrics.executor)


def _of_executor(measures: Measures) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    methods = HistogramMetricFamily(
        "mpexec_method_seconds", "How long a method took inside a rank.", labels=["rank", "method"]
    )
    fill = GaugeMetricFamily("mpexec_ring_fill", "How full a ring is, 0 to 1.", labels=["ring"])
    spins = CounterMetricFamily("mpexec_waits_spun", "Waits that ended while spinning.", labels=["who"])
    parks = CounterMetricFamily("mpexec_waits_parked", "Waits for which the waiter went to sleep.", labels=["who"])
    sides = [("calls", "driver", measures.call_ring_fill, measures.spins, measures.parks)]
    for one in measures.ranks:
        for method, histogram in sorted((one.methods or {}).items()):
            _add(methods, [str(one.rank), method], histogram)
        sides.append((f"replies of rank {one.rank}", f"rank {one.rank}", one.reply_ring_fill, one.spins, one.parks))
    for ring, who, level, spun, parked in sides:
        if level is not None:
            fill.add_metric([ring], level)
        if spun is not None and parked is not None:
            spins.add_metric([who], spun)
            parks.add_metric([who], parked)
    yield from (methods, fill, spins, parks)


def _add(family: object, labels: list[str], histogram: Histogram) -> None:
    buckets = [(f"{bound:.9g}", count) for bound, count in histogram.cumulative(_FIRST, _LAST)]
    family.add_metric(labels, [*buckets, ("+Inf", histogram.count)], histogram.total_ns / 1e9)  # type: ignore[attr-defined]
