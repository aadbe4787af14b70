"""Measured costs of a model's layers on one kind of device, at several microbatch sizes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from planner.artifacts.document import Count, Record, read_json, write_atomically
from planner.artifacts.formats import check_format
from planner.artifacts.graph_record import MeasuredTimes, Name, Seconds
from planner.artifacts.job import Precision
from planner.errors import PipeplanError

FORMAT = "pipeplan-costs/1"
Samples = Annotated[int, Field(ge=1, le=2**20)]


class Timing(Record):
    """How long something took, over some repeats.

    Attributes:
        median_s: seconds.
        low_s, high_s: the quartiles.
        repeats: so many were measured, after others to warm up.
    """

    median_s: Seconds
    low_s: Seconds
    high_s: Seconds
    repeats: Annotated[int, Field(ge=1, lt=2**31)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low_s <= self.median_s <= self.high_s:
            raise ValueError(
                f"median_s: {self.median_s:g} is not between the quartiles low_s {self.low_s:g} "
                f"and high_s {self.high_s:g}; measure again"
            )
        return self

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        return (self.high_s - self.low_s) / self.median_s if self.median_s else 0.0


class SizedCosts(Record):
    """What a layer took for one microbatch of so many samples.

    Attributes:
        samples_per_microbatch: the size.
        forward_flops: that the trace counts, to tell whether another graph is of the same model.
        forward, backward: of a whole backward; zero length where nothing takes a gradient.
        input_gradient, weight_gradient: the halves of a split one.
        stash_bytes: held from the forward until the backward beside parameters and the input.
        weight_stash_bytes: held from a separate input gradient until the weight gradient: what of
            the stash is still needed, and the gradients of what the layer's products made.
        forward_bytes, backward_bytes: the most that was held beside parameters, their gradients
            and what the layer was given, input or gradients, while each ran; the stash and what
            it made, output or gradients, among it.
    """

    samples_per_microbatch: Samples
    forward_flops: Count
    forward: Timing
    backward: Timing
    input_gradient: Timing
    weight_gradient: Timing
    stash_bytes: Count
    weight_stash_bytes: Count
    forward_bytes: Count
    backward_bytes: Count

    @property
    def times(self) -> MeasuredTimes:
        """The medians."""
        return MeasuredTimes(
            forward_s=self.forward.median_s,
            input_gradient_s=self.input_gradient.median_s,
            weight_gradient_s=self.weight_gradient.median_s,
            backward_s=self.backward.median_s,
        )


class LayerKind(Record):
    """Layers that do the same work, measured once.

    Attributes:
        layers: their names.
        sizes: by microbatch size, ascending.
    """

    layers: Annotated[tuple[Name, ...], Field(min_length=1)]
    sizes: tuple[SizedCosts, ...] = ()

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for first, second in pairwise(row.samples_per_microbatch for row in self.sizes):
            if first >= second:
                raise ValueError(
                    f"sizes: {second} samples come after {first}; give each size once, ascending"
                )
        return self

    def at(self, samples: int) -> SizedCosts | None:
        """What was measured at a size."""
        return next((row for row in self.sizes if row.samples_per_microbatch == samples), None)


class Costs(Record):
    """What was measured of a model on one device.

    Attributes:
        format: ``pipeplan-costs/1``.
        model: its name.
        precision: of its weights.
        device_type: its name in cluster files.
        hardware: what it is.
        threads: that computed; None of a GPU.
        made_with: versions, by name.
        date: of the first measurement, ISO 8601.
        kinds: layers that do the same work, in the order of the model.
    """

    format: Literal["pipeplan-costs/1"] = "pipeplan-costs/1"
    model: Name
    precision: Precision
    device_type: Name
    hardware: Name
    threads: Annotated[int, Field(ge=1, lt=2**16)] | None = None
    made_with: dict[Name, Name]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    kinds: Annotated[tuple[LayerKind, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _every_layer_once(self) -> Self:
        names = Counter(name for kind in self.kinds for name in kind.layers)
        name, count = names.most_common(1)[0]
        if count > 1:
            raise ValueError(f"kinds: layer {name!r} stands there {count} times; keep one of them")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """Read a costs file.

        Raises:
            PipeplanError: naming every wrong field.
        """
        return cls.from_data(read_json(path), str(path))

    @classmethod
    def from_data(cls, data: Any, source: str = "costs") -> Costs:
        """Check plain data in the form of a costs file."""
        return cls.parse(check_format(data, FORMAT, source), source)

    def save(self, path: str | Path) -> None:
        """Write the file, atomically."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

    def stash_bytes(self, layer: str, samples: int) -> int:
        """Bytes that a layer keeps for its backward, those of its input left out.

        Raises:
            PipeplanError: as of :meth:`at`.
        """
        low, high = self._around(layer, samples)
        return round(_between(low, high, samples, low.stash_bytes, high.stash_bytes))

    def weight_stash_bytes(self, layer: str, samples: int) -> int:
        """Bytes that waiting weight gradients keep, those of input and output left out.

        Raises:
            PipeplanError: as of :meth:`at`.
        """
        low, high = self._around(layer, samples)
        return round(_between(low, high, samples, low.weight_stash_bytes, high.weight_stash_bytes))

    def forward_bytes(self, layer: str, samples: int) -> int:
        """The most that a layer's forward holds beside parameters and its input.

        Raises:
            PipeplanError: as of :meth:`at`.
        """
        low, high = self._around(layer, samples)
        return round(_between(low, high, samples, low.forward_bytes, high.forward_bytes))

    def backward_bytes(self, layer: str, samples: int) -> int:
        """The same of a whole backward, the gradients that it is given left out.

        Raises:
            PipeplanError: as of :meth:`at`.
        """
        low, high = self._around(layer, samples)
        return round(_between(low, high, samples, low.backward_bytes, high.backward_bytes))

    def at(self, layer: str, samples: int) -> MeasuredTimes:
        """Seconds of a layer for a microbatch of so many samples.

        What was not measured at this size is taken from the nearest sizes below and above, by a
        straight line between them.

        Raises:
            PipeplanError: if the layer is not there, or the size lies outside those measured.
        """
        low, high = self._around(layer, samples)
        first, second = low.times.model_dump(), high.times.model_dump()
        return MeasuredTimes(
            **{k: _between(low, high, samples, first[k], second[k]) for k in first}
        )

    def _around(self, layer: str, samples: int) -> tuple[SizedCosts, SizedCosts]:
        """The nearest sizes, one of them twice if it was measured itself."""
        sizes = self._kind_of(layer).sizes
        below = [row for row in sizes if row.samples_per_microbatch <= samples]
        above = [row for row in sizes if row.samples_per_microbatch >= samples]
        if not below or not above:
            measured = ", ".join(str(row.samples_per_microbatch) for row in sizes) or "none"
            raise PipeplanError(
                f"kinds: layer {layer!r} has no costs at samples_per_microbatch = {samples} "
                f"(measured: {measured}); profile the model with --samples {samples} among the "
                "sizes"
            )
        return below[-1], above[0]

    def _kind_of(self, layer: str) -> LayerKind:
        for kind in self.kinds:
            if layer in kind.layers:
                return kind
        raise PipeplanError(
            f"kinds: layer {layer!r} is in none of them: these are the costs of another model, or "
            "of another version of it; profile this one"
        )


def _between(low: SizedCosts, high: SizedCosts, samples: int, first: float, second: float) -> float:
    """On the straight line between two sizes."""
    if low is high:
        return first
    whole = high.samples_per_microbatch - low.samples_per_microbatch
    return first + (samples - low.samples_per_microbatch) / whole * (second - first)
