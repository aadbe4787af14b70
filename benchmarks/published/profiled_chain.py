"""Layers that were profiled one by one, in a row, as a layer graph.

What such profiles of planners do not say is filled in by rules, each with a note for the user:

- Only the input and weight gradients together were timed: half and half, as in a matrix product,
  whose two gradients cost the same (Qi et al. 2024, "Zero bubble pipeline parallelism", section 2);
  the first layer has no input gradient.
- A tensor-parallel group is one device: its times contain the group's own collectives, and its
  bytes are those of all its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

from planner.cluster.hardware import DeviceType
from planner.errors import PipeplanError, shorten
from planner.job import BYTES_OF, Job
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import Boundary, GraphRecord, Layer, Parameter
from planner.model.layer_graph import LayerGraph


@dataclass(frozen=True)
class Imported:
    """A profile as a layer graph and a job, with notes on what was assumed."""

    graph: LayerGraph
    job: Job
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ProfiledLayer:
    """One layer and one microbatch.

    Attributes:
        name: unique name.
        forward_s: seconds of the forward.
        backward_s: seconds of the whole backward.
        output_bytes: what the next layer reads.
        parameter_bytes: its parameters.
        stash_bytes: kept from forward to backward.
        weight_gradient_s: seconds of the weight gradient, a part of the backward; None if it was
            not timed apart.
    """

    name: str
    forward_s: float
    backward_s: float
    output_bytes: int
    parameter_bytes: int
    stash_bytes: int
    weight_gradient_s: float | None = None

    def weight_s(self, *, is_first: bool) -> float:
        """Return the seconds of the weight gradient, as timed or by the rules of this module."""
        if self.weight_gradient_s is not None:
            return self.weight_gradient_s
        if is_first:
            return self.backward_s
        return self.backward_s / 2 if self.parameter_bytes else 0.0


@dataclass(frozen=True)
class Measured:
    """What times were measured on, and of what.

    Attributes:
        name: of the type of device, in the cluster file too.
        figures: its figures, from which times on other types of device are scaled.
        samples: per microbatch.
        precision: of the weights.
    """

    name: str
    figures: DeviceType
    samples: int
    precision: str


def group_of(name: str, figures: DeviceType, size: int) -> tuple[str, DeviceType]:
    """Return the name and figures of a tensor-parallel group that counts as one device."""
    if size == 1:
        return name, figures
    peaks = {key: value * size for key, value in figures.peak_tflop_per_s.items()}
    update: dict[str, Any] = {
        "memory_gib": figures.memory_gib * size,
        "reserved_gib": figures.reserved_gib * size,
        "memory_bandwidth_gb_per_s": figures.memory_bandwidth_gb_per_s * size,
        "peak_tflop_per_s": peaks,
    }
    return f"{size}x{name}", figures.model_copy(update=update)


def chain_graph(name: str, layers: Sequence[ProfiledLayer], measured: Measured) -> LayerGraph:
    """Return layers that each read the output of the one before, as a layer graph."""
    precision, element = measured.precision, BYTES_OF[measured.precision]
    flop_per_s = _flop_per_s(measured)
    return LayerGraph.from_record(
        GraphRecord(
            name=name[:100],
            samples_per_microbatch=measured.samples,
            precision=precision,
            layers=tuple(
                _layer(row, measured.name, flop_per_s, is_first=index == 0)
                for index, row in enumerate(layers)
            ),
            boundaries=tuple(
                Boundary(
                    name=row.name,
                    producer=row.name,
                    users=(user.name,),
                    bytes=row.output_bytes,
                    shape=(row.output_bytes // element,),
                    dtype=precision,
                    requires_grad=True,
                )
                for row, user in pairwise(layers)
            ),
            parameters=tuple(
                Parameter(
                    name=f"{row.name}.parameters",
                    elements=row.parameter_bytes // element,
                    bytes=row.parameter_bytes,
                )
                for row in layers
                if row.parameter_bytes
            ),
            flop_coverage=0.0,
        )
    )


def imported_chain(
    name: str, layers: Sequence[ProfiledLayer], measured: Measured, notes: Sequence[str]
) -> Imported:
    """Return a row of layers as an import, with a job of whole backwards of its size."""
    return Imported(
        graph=chain_graph(name, layers, measured),
        job=Job.model_validate(
            {
                "name": name[:100],
                "samples_per_microbatch": measured.samples,
                "precision": measured.precision,
                "backward": "whole",
            }
        ),
        notes=tuple(notes),
    )


def _flop_per_s(measured: Measured) -> float:
    figures = measured.figures
    peaks = figures.peak_tflop_per_s
    return peaks.get(measured.precision, max(peaks.values())) * figures.efficiency * 1e12


def _layer(row: ProfiledLayer, device: str, flop_per_s: float, *, is_first: bool) -> Layer:
    weight_s = row.weight_s(is_first=is_first)
    input_s = row.backward_s - weight_s
    return Layer(
        name=row.name,
        forward_flops=round(row.forward_s * flop_per_s),
        input_gradient_flops=round(input_s * flop_per_s),
        weight_gradient_flops=round(weight_s * flop_per_s),
        forward_traffic_bytes=0,
        input_gradient_traffic_bytes=0,
        weight_gradient_traffic_bytes=0,
        stash_bytes=row.stash_bytes,
        parameters=(f"{row.name}.parameters",) if row.parameter_bytes else (),
        measured={
            device: MeasuredTimes(
                forward_s=row.forward_s, input_gradient_s=input_s, weight_gradient_s=weight_s
            )
        },
    )


def amount(value: Any, field: str, least: float = 0.0) -> float:
    """Return a time or size of a file.

    Raises:
        PipeplanError: naming the field if it is no finite number or below ``least``.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or not least <= value <= 1e18:
        raise PipeplanError(
            f"{field}: expected a number of at least {least:g}, found {shorten(value)}; profile "
            "it again"
        )
    return float(value)


def table(value: Any, field: str) -> dict[str, Any]:
    """Return an object of a file.

    Raises:
        PipeplanError: naming the field if it is no object or empty.
    """
    if not isinstance(value, dict) or not value:
        raise PipeplanError(f"{field}: expected an object with entries, found {shorten(value)}")
    return value


def entry(values: dict[str, Any], key: str, field: str, remedy: str) -> Any:
    """Return an entry of an object of a file.

    Raises:
        PipeplanError: naming the entries that there are, and the remedy.
    """
    if key not in values:
        there = ", ".join(map(str, list(values)[:12]))
        raise PipeplanError(f"{field}: has no {shorten(key)}, only {there}; {remedy}")
    return values[key]


def group_note(size: int) -> tuple[str, ...]:
    """Return what a user has to know of the tensor degree that was imported."""
    if size == 1:
        return ()
    return (
        f"a device stands for a tensor-parallel group of {size} GPUs: times contain its "
        "collectives, bytes are those of all of them; a cluster file must have such devices",
    )


def skipped_note(degrees: Sequence[str], size: int) -> tuple[str, ...]:
    """Return which tensor degrees of a file were left out."""
    rest = [degree for degree in degrees if degree != str(size)]
    if not rest:
        return ()
    return (
        f"times of tensor-parallel degree {', '.join(rest)} are not "
        "imported; --given tensor_parallel=N takes those of N",
    )
