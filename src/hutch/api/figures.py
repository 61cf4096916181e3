"""What a monitor reads: how many requests of which kind, how long they took, and how many boxes
there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .watch import Watch

if TYPE_CHECKING:
    from hutch.engine.service import Service

KIND = b"text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


class Figures:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._counts = Counter(
            "hutch_requests", "Requests, by route and status.", ["verb", "route", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._times = Histogram(
            "hutch_request_seconds", "How long requests took.", ["verb", "route"],
            buckets=_BUCKETS, registry=self._registry,
        )  # fmt: skip
        self._ended: Mapping[str, int] = {}  # connections, by reason
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
        for name, value in self._service.figures().items():
            yield GaugeMetricFamily(f"hutch_{name}", name.replace("_", " "), value)
        ended = CounterMetricFamily(
            "hutch_connections_ended", "Connections that the server ended.", labels=["reason"]
        )
        for reason, count in self._ended.items():
            ended.add_metric([reason], count)
        yield ended

    def text(self, watch: Watch) -> bytes:
        self._ended = watch.ended
        return generate_latest(self._registry)
