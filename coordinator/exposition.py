"""The metrics in Prometheus' text format, collected when somebody asks.

Nothing here runs between two scrapes. ``prometheus_client`` is imported with this module, by whoever
serves the metrics, so that a coordinator without HTTP does not load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from coordinator.metrics import PREFIX, TABLE, Histogram, Metric

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric as Family

    from coordinator.overview import Overview


class Exposition(Collector):
    """All metrics of one coordinator, in a registry of their own."""

    content_type: str = CONTENT_TYPE_LATEST

    def __init__(self, overview: Overview) -> None:
        """Read from ``overview``."""
        self._overview = overview
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return the exposition; all of it is of one moment, for nothing else runs meanwhile."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Family]:
        """Name the metrics without looking at anything."""
        for metric in TABLE:
            yield GaugeMetricFamily(f"{PREFIX}{metric.name}", metric.help)

    def collect(self) -> Iterator[Family]:
        """Read every metric."""
        for metric in TABLE:
            yield _family(metric, self._overview)


def _family(metric: Metric, overview: Overview) -> Family:
    name, values = f"{PREFIX}{metric.name}", metric.read(overview)
    if isinstance(values, Histogram):
        histogram = HistogramMetricFamily(name, metric.help)
        histogram.add_metric([], values.cumulative(), values.sum_s)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(name, metric.help, labels=metric.labels)
    for labels, value in (values if isinstance(values, dict) else {(): values}).items():
        family.add_metric(labels, value)
    return family
