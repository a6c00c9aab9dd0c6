"""The engine's counts in Prometheus' text format, read from the engine when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from mpexec.engine.prometheus import families
from mpexec.http.health import HealthCheck
from mpexec.http.served import ServedEngine

__all__ = ["CONTENT_TYPE", "EngineMetrics"]


class _EngineCollector(Collector):
    """Asks the engine at each scrape, so nothing is counted twice and nothing goes stale."""

    def __init__(self, engine: ServedEngine, health: HealthCheck, name: str) -> None:
        self._engine = engine
        self._health = health
        self._name = name

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        yield from families(self._engine.metrics())
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
