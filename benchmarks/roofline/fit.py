"""Efficiencies of a device type from times of layers, and how far the roofline stays off them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planner.cluster.hardware import ClassEfficiency, DeviceType
from planner.costs.roofline import layer_times
from planner.model.graph_record import Layer

Figures = Mapping[str, float]
START: Figures = {
    "product": 0.6,
    "convolution": 0.5,
    "attention": 0.4,
    "memory_bandwidth": 0.5,
    "convolution_bandwidth": 0.2,  # The bound binds nothing further up, where a search would stay.
    "bandwidth": 0.7,
    "convolution_ramp_up_us": 20.0,
}
LEAST: Figures = {**dict.fromkeys(START, 0.01), "convolution_ramp_up_us": 0.1}
MOST: Figures = {**dict.fromkeys(START, 1.0), "convolution_ramp_up_us": 500.0}
STEPS = (0.5, 0.25, 0.12, 0.06, 0.03)
"""Steps of the search, in logarithms: it ends within 3 % of what it would find in the end."""
PULL = 1e-3
"""How much a factor e away from the start counts: decides figures that no time depends on."""


@dataclass(frozen=True)
class Timed:
    """A layer's time to fit.

    Attributes:
        group: the model it is of.
        name: of the layer and the kind of operation.
        layer: with its work.
        precision: of the model.
        kind: F, B, I or W.
        measured_s: what it took.
        share: of its group's time of this kind, from 0 to 1, with all layers alike.
    """

    group: str
    name: str
    layer: Layer
    precision: str
    kind: str
    measured_s: float
    share: float

    def error(self, device: DeviceType) -> float:
        """Natural logarithm of predicted over measured."""
        times = layer_times(self.layer, "none", device, self.precision)
        return math.log(max(times.seconds(self.kind), 1e-12) / self.measured_s)


def device_with(device: DeviceType, figures: Figures) -> DeviceType:
    """A device type with fitted figures in place of its own; overhead and ramp-up stay."""
    return device.model_copy(
        update={
            "efficiency": figures["product"],
            "bandwidth_efficiency": figures["bandwidth"],
            "by_class": {
                "product": ClassEfficiency(efficiency=figures["product"]),
                "convolution": ClassEfficiency(
                    efficiency=figures["convolution"],
                    bandwidth_efficiency=figures["convolution_bandwidth"],
                    ramp_up_us=figures["convolution_ramp_up_us"],
                ),
                "attention": ClassEfficiency(efficiency=figures["attention"]),
                "memory": ClassEfficiency(bandwidth_efficiency=figures["memory_bandwidth"]),
            },
        }
    )


def fit(rows: Sequence[Timed], device: DeviceType, start: Figures = START) -> dict[str, float]:
    """The figures of least mean absolute logarithmic error, each row by its share of time.

    The absolute value keeps single odd layers from deciding. A pattern search (Hooke and Jeeves
    1961) in the logarithms of the figures: it has no derivatives and no random numbers.
    """
    return pattern_search(lambda figures: _mean(rows, device_with(device, figures)), start)


def pattern_search(loss: Callable[[Figures], float], start: Figures) -> dict[str, float]:
    """Figures of small loss, by steps along one of them at a time."""

    def valued(figures: Figures) -> float:
        return loss(figures) + PULL * sum(abs(math.log(figures[n] / start[n])) for n in figures)

    best, least = dict(start), valued(start)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name in best:
                for factor in (math.exp(step), math.exp(-step)):
                    value = min(max(best[name] * factor, LEAST[name]), MOST[name])
                    tried = {**best, name: value}
                    if (found := valued(tried)) < least - 1e-6:
                        best, least, improved = tried, found, True
                        break
    return best


def _mean(rows: Sequence[Timed], device: DeviceType) -> float:
    total = sum(row.share for row in rows)
    return sum(row.share * abs(row.error(device)) for row in rows) / total


@dataclass(frozen=True)
class Errors:
    """Predicted over measured, less 1.

    Attributes:
        whole: of each group's time, by (group, kind).
        median, worst: absolute, of the layers that take a noticeable share of their group's time.
        worst_name: the layer of the worst.
    """

    whole: Mapping[tuple[str, str], float]
    median: float
    worst: float
    worst_name: str


def errors(rows: Sequence[Timed], device: DeviceType, noticeable: float = 0.02) -> Errors:
    """Return the remaining errors of predictions."""
    whole: dict[tuple[str, str], float] = {}
    for row in rows:
        # Shares of measured time, each scaled to what was predicted, add up to the ratio.
        key = (row.group, row.kind)
        whole[key] = whole.get(key, 0.0) + row.share * math.exp(row.error(device))
    single = [
        (abs(math.expm1(row.error(device))), f"{row.group}: {row.name}, {row.kind}")
        for row in rows
        if row.share >= noticeable
    ]
    worst, name = max(single)
    return Errors({k: v - 1 for k, v in whole.items()}, median(e for e, _ in single), worst, name)


def left_out(rows: Sequence[Timed], device: DeviceType) -> dict[str, Errors]:
    """Each group's errors under figures fitted to all the others (cross-validation)."""
    found = {}
    for group in dict.fromkeys(row.group for row in rows):
        others = [row for row in rows if row.group != group]
        own = [row for row in rows if row.group == group]
        found[group] = errors(own, device_with(device, fit(others, device)))
    return found
