"""Prometheus metrics: requests and their durations, sessions, and connections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .limits import ConnectionLimits

if TYPE_CHECKING:
    from hutch.server.service import Service

KIND = b"text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


class Metrics:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._counts = Counter(
            "hutch_requests",
            "Requests, by route and status.",
            ["verb", "route", "status"],
            registry=self._registry,
        )
        self._times = Histogram(
            "hutch_request_seconds",
            "How long requests took.",
            ["verb", "route"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._limits = ConnectionLimits()  # until somebody asks, over a connection of this server
        self._registry.register(self)
        self._counters: dict[tuple[str, str, int], Any] = {}  # to look labels up is slow
        self._timers: dict[tuple[str, str], Any] = {}

    def add(self, verb: str, route: str, status: int, seconds: float) -> None:
        """Routes are templates: what callers make up is no name for a series."""
        counter = self._counters.get((verb, route, status))
        if counter is None:
            labels = self._counts.labels(verb, route, status)
            counter = self._counters[verb, route, status] = labels
        counter.inc()
        timer = self._timers.get((verb, route))
        if timer is None:
            timer = self._timers[verb, route] = self._times.labels(verb, route)
        timer.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Asked by the registry."""
        yield from _gauges(self._service.metrics())
        ended = CounterMetricFamily(
            "hutch_connections_ended", "Connections that the server ended.", labels=["reason"]
        )
        for reason, count in self._limits.ended.items():
            ended.add_metric([reason], count)
        yield ended
        yield GaugeMetricFamily("hutch_connections", "Open connections.", self._limits.count)

    def text(self, limits: ConnectionLimits, owner: str | None) -> bytes:
        """Everything; or, of one owner, what says nothing about others."""
        if owner is not None:
            own = CollectorRegistry()
            own.register(_Fixed(_gauges(self._service.metrics(owner))))
            return generate_latest(own)
        self._limits = limits
        return generate_latest(self._registry)


class _Fixed(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics


def _gauges(values: Mapping[str, float]) -> Iterator[Metric]:
    for name, value in values.items():
        yield GaugeMetricFamily(f"hutch_{name}", name.replace("_", " "), value)
