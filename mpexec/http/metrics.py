"""The engine's counts in Prometheus' text format, read from the engine when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from mpexec.http.health import HealthCheck
from mpexec.http.served import ServedEngine

__all__ = ["CONTENT_TYPE", "EngineMetrics"]

# By field of the engine's metrics; Prometheus' own suffix for counters is added.
_COUNTERS = {
    "requests": ("mpexec_requests", "Requests taken, refused ones included."),
    "finished": ("mpexec_requests_finished", "Requests answered to the end."),
    "cancelled": ("mpexec_requests_cancelled", "Requests given up by the client."),
    "refused": ("mpexec_requests_refused", "Requests for which there was no room, or that cannot run."),
    "prompt_tokens": ("mpexec_prompt_tokens", "Tokens of all prompts."),
    "generated_tokens": ("mpexec_generated_tokens", "New tokens handed out."),
    "steps": ("mpexec_steps", "Steps of the model."),
}
_GAUGES = {
    "running": ("mpexec_requests_running", "Requests that have a slot now."),
    "waiting": ("mpexec_requests_waiting", "Requests that wait for a slot now."),
    "tokens_per_second": ("mpexec_tokens_per_second", "New tokens per second over the last ten seconds."),
}


class _EngineCollector(Collector):
    """Asks the engine at each scrape, so nothing is counted twice and nothing goes stale."""

    def __init__(self, engine: ServedEngine, health: HealthCheck, name: str) -> None:
        self._engine = engine
        self._health = health
        self._name = name

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        metrics = self._engine.metrics()
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(metrics, field))
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(metrics, field))
        yield GaugeMetricFamily("mpexec_healthy", "1 while requests make progress.", value=self._health.check().ok)
        yield InfoMetricFamily("mpexec_model", "What is served.", value={"name": self._name})


class EngineMetrics:
    """The metrics of one engine, in a registry of its own: what else the process counts does not show here."""

    def __init__(self, engine: ServedEngine, health: HealthCheck, name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, health, name))

    def text(self) -> bytes:
        """The body of `/metrics`."""
        return generate_latest(self._registry)
