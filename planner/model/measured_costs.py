"""The file of measured costs of a model's layers on one device type, by microbatch size."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planner.errors import PipeplanError
from planner.job import Optimizer, Precision
from planner.model.figures import MeasuredTimes, Name, Seconds
from planner.records.document import MOST_ENTRIES, Count, Record, left_out
from planner.records.formats import JsonFile
from planner.units import plural

FORMAT = "pipeplan-costs/1"
UNEASY_SPREAD = 0.1
"""A spread of all measurements that is told wherever they are used."""
Samples = Annotated[int, Field(ge=1, le=2**20)]
Size = tuple[int, int | None]
"""Samples of a microbatch and its length in tokens; None: that of the model's own batch."""
HeldBytes = Literal["stash_bytes", "weight_stash_bytes", "forward_bytes", "backward_bytes"]
_MOST_SIZES, _MOST_KINDS = 1024, 10_000


class Timing(Record):
    """Repeated measurements of a time.

    Attributes:
        median_s: Median.
        low_s: Lower quartile.
        high_s: Upper quartile.
        repeats: Number of measurements after warm-up.
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
        """Distance between the quartiles as a fraction of the median."""
        return (self.high_s - self.low_s) / self.median_s if self.median_s else 0.0


class SizedCosts(Record):
    """Costs of a layer for one microbatch of a given size.

    Attributes:
        samples_per_microbatch: Microbatch size.
        tokens: Length of the microbatch, of a job with several; null: that of the model's batch.
        forward_flops: FLOPs counted by the trace, to recognise the model.
        forward: Time of the forward.
        backward: Time of the whole backward; 0 if nothing takes a gradient.
        input_gradient: Time of the input gradient of a split backward.
        weight_gradient: Time of the weight gradient of a split backward.
        stash_bytes: Memory held from forward to backward, without parameters and input.
        weight_stash_bytes: Memory held from a split input gradient to the weight gradient: what is
            still needed of the stash, and output gradients of the layer's products.
        forward_bytes: Peak memory during the forward, without parameters, their gradients and the
            layer's inputs; includes stash and outputs.
        backward_bytes: Peak memory during the backward, without parameters, their gradients and the
            gradients it is given; includes stash and outputs.
    """

    samples_per_microbatch: Samples
    tokens: Annotated[int, Field(ge=1)] | None = left_out(None)
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
    def size(self) -> Size:
        """Samples and tokens of the microbatch."""
        return self.samples_per_microbatch, self.tokens

    @property
    def times(self) -> MeasuredTimes:
        """The medians of all times."""
        return MeasuredTimes(
            forward_s=self.forward.median_s,
            input_gradient_s=self.input_gradient.median_s,
            weight_gradient_s=self.weight_gradient.median_s,
            backward_s=self.backward.median_s,
        )


def in_order(size: Size) -> tuple[int, int]:
    """Return a key that sorts sizes by length, those of the model's batch first, and samples."""
    samples, tokens = size
    return tokens or 0, samples


def in_words(size: Size) -> str:
    """Return a size as lines and messages tell it."""
    samples, tokens = size
    return plural(samples, "sample") + ("" if tokens is None else f" of {tokens} tokens")


class LayerKind(Record):
    """Layers that do the same work and were measured once.

    Attributes:
        layers: Names of the layers.
        sizes: Costs by microbatch size, ascending by length and then by samples.
    """

    layers: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MOST_ENTRIES)]
    sizes: Annotated[tuple[SizedCosts, ...], Field(max_length=_MOST_SIZES)] = ()

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for first, second in pairwise(row.size for row in self.sizes):
            if in_order(first) >= in_order(second):
                raise ValueError(
                    f"sizes: that of {in_words(second)} comes after that of {in_words(first)}; "
                    "give each size once, ascending"
                )
        return self

    def at(self, size: Size) -> SizedCosts | None:
        """Return the costs measured at a microbatch size."""
        return next((row for row in self.sizes if row.size == size), None)

    def around(self, samples: int) -> tuple[SizedCosts, SizedCosts] | None:
        """Return the nearest sizes of the model's batch, one twice if it was measured itself.

        None if nothing was measured below or above.
        """
        rows = [row for row in self.sizes if row.tokens is None]
        below = [row for row in rows if row.samples_per_microbatch <= samples]
        above = [row for row in rows if row.samples_per_microbatch >= samples]
        return (below[-1], above[0]) if below and above else None


class OptimizerCosts(Record):
    """Costs of the optimizer's step.

    Attributes:
        optimizer: Name of the optimizer, as in job files.
        elements: Number of parameters that were updated.
        step: Time of the step.
    """

    optimizer: Optimizer
    elements: Annotated[int, Field(ge=1, lt=2**53)]
    step: Timing


class Costs(JsonFile):
    """Measured costs of a model on one device.

    Attributes:
        format: ``pipeplan-costs/1``.
        model: Name of the model.
        precision: Data type of the weights.
        device_type: Name of the device type in cluster files.
        hardware: Hardware description.
        threads: CPU threads; null on a GPU.
        made_with: Versions by name.
        date: Date of the first measurement, ISO 8601.
        kinds: Groups of layers that do the same work, in model order.
        optimizer: Costs of the optimizer's step; null in files of earlier versions.
    """

    format: Literal["pipeplan-costs/1"] = "pipeplan-costs/1"
    model: Name
    precision: Precision
    device_type: Name
    hardware: Name
    threads: Annotated[int, Field(ge=1, lt=2**16)] | None = None
    made_with: dict[Name, Name]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    kinds: Annotated[tuple[LayerKind, ...], Field(min_length=1, max_length=_MOST_KINDS)]
    optimizer: OptimizerCosts | None = None

    @model_validator(mode="after")
    def _every_layer_once(self) -> Self:
        names = Counter(name for kind in self.kinds for name in kind.layers)
        name, count = names.most_common(1)[0]
        if count > 1:
            raise ValueError(f"kinds: layer {name!r} appears {count} times; keep one of them")
        return self

    @property
    def spread(self) -> float:
        """Distance between the quartiles of forwards and backwards, as a share of their time."""
        rows = [(len(kind.layers), row) for kind in self.kinds for row in kind.sizes]
        times = [(count, time) for count, row in rows for time in (row.forward, row.backward)]
        total_s = sum(count * time.median_s for count, time in times)
        apart_s = sum(count * (time.high_s - time.low_s) for count, time in times)
        return apart_s / total_s if total_s else 0.0

    @property
    def spread_warning(self) -> str | None:
        """What to say where repetitions differ so much that predictions suffer."""
        if self.spread <= UNEASY_SPREAD:
            return None
        return (
            f"repetitions of a measurement differ by {self.spread:.0%} of their time (quartiles, "
            "all layers): something else used the machine, or its speed varies, and a prediction "
            "from these costs may be off by as much; profile again when nothing does"
        )

    def at_length(self, tokens: int) -> Costs:
        """Return the costs of microbatches of one of a job's lengths, as if of the model's batch.

        Raises:
            PipeplanError: if nothing was measured at this length.
        """
        kinds = tuple(
            LayerKind(
                layers=kind.layers,
                sizes=tuple(
                    row.model_copy(update={"tokens": None})
                    for row in kind.sizes
                    if row.tokens == tokens
                ),
            )
            for kind in self.kinds
        )
        if not any(kind.sizes for kind in kinds):
            raise PipeplanError(
                f"kinds: nothing was measured at {tokens} tokens; run `pipeplan profile` with the "
                "job that has these lengths"
            )
        return self.model_copy(update={"kinds": kinds})

    def bytes_at(self, figure: HeldBytes, layer: str, samples: int) -> int:
        """Return a layer's memory for a microbatch, one of the figures of :class:`SizedCosts`.

        Raises:
            PipeplanError: as :meth:`at`.
        """
        low, high = self._around(layer, samples)
        return round(_between(low, high, samples, getattr(low, figure), getattr(high, figure)))

    def at(self, layer: str, samples: int) -> MeasuredTimes:
        """Return the times of a layer for a microbatch of a given size.

        Sizes that were not measured are interpolated linearly between the nearest sizes below and
        above.

        Raises:
            PipeplanError: if the layer is missing, or the size is outside the measured range.
        """
        low, high = self._around(layer, samples)
        first, second = low.times.model_dump(), high.times.model_dump()
        return MeasuredTimes(
            **{k: _between(low, high, samples, first[k], second[k]) for k in first}
        )

    def _around(self, layer: str, samples: int) -> tuple[SizedCosts, SizedCosts]:
        """Return the nearest measured sizes, the same one twice if the size itself was measured."""
        kind = self._kind_of(layer)
        around = kind.around(samples)
        if around is None:
            sizes = (str(row.samples_per_microbatch) for row in kind.sizes if row.tokens is None)
            measured = ", ".join(sizes) or "none"
            measured += " of one length" if any(row.tokens for row in kind.sizes) else ""
            raise PipeplanError(
                f"kinds: layer {layer!r} has no costs at samples_per_microbatch = {samples} "
                f"(measured: {measured}); profile the model with --samples {samples} among the "
                "sizes"
            )
        return around

    def _kind_of(self, layer: str) -> LayerKind:
        for kind in self.kinds:
            if layer in kind.layers:
                return kind
        raise PipeplanError(
            f"kinds: layer {layer!r} is in none of them: these are the costs of another model, or "
            "of another version of it; profile this one"
        )


def _between(low: SizedCosts, high: SizedCosts, samples: int, first: float, second: float) -> float:
    """Interpolate linearly between two sizes."""
    if low is high:
        return first
    whole = high.samples_per_microbatch - low.samples_per_microbatch
    return first + (samples - low.samples_per_microbatch) / whole * (second - first)
