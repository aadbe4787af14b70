"""The index of a sweep's folder: what was swept, and what was found at each point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from planner.artifacts.document import Count, Record, read_json, write_atomically
from planner.artifacts.formats import check_format
from planner.artifacts.job import MAX_MICROBATCHES, Job, JsonValue
from planner.errors import shorten

FORMAT = "pipeplan-sweep/2"
INDEX_NAME = "sweep.json"
"""Of the index in its folder."""
MAX_SAMPLES = 2**20
SWEPT_JOB_FIELDS = frozenset(("name", "samples_per_microbatch", "microbatches", "model_arguments"))
"""What of a job a sweep varies, changes no plan, or stands in the index beside it."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}$")]
"""Of a cluster; it stands in file names."""
PlanName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.json$")]
"""Of a file in the folder itself."""
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Devices = Annotated[int, Field(ge=1, lt=2**31)]
NonNegative = Annotated[float, Field(ge=0)]


class Point(NamedTuple):
    """One combination of a sweep.

    Attributes:
        cluster: the label of one.
        devices: how many of its devices a plan may use.
        samples_per_microbatch: size of a microbatch.
        microbatches: of an iteration.
    """

    cluster: str
    devices: int
    samples_per_microbatch: int
    microbatches: int

    @property
    def samples(self) -> int:
        """Of an iteration."""
        return self.samples_per_microbatch * self.microbatches

    @property
    def plan_name(self) -> str:
        """Of its plan's file."""
        batch = f"{self.microbatches}x{self.samples_per_microbatch}"
        return f"{self.cluster}-{self.devices}-devices-{batch}.json"

    def __str__(self) -> str:
        noun = "device" if self.devices == 1 else "devices"
        return (
            f"{self.cluster}, {self.devices} {noun}, "
            f"{self.microbatches} x {self.samples_per_microbatch} samples"
        )


class SweepSettings(Record):
    """How each point is searched, see :func:`planner.solver.solve`.

    Attributes:
        time_limit_s: of each point, the choice of its devices included.
        gap_limit: a point's search ends at it.
        seed: of all searches.
        deterministic: whether the limit is in CP-SAT's deterministic seconds.
    """

    time_limit_s: Annotated[float, Field(gt=0)] = 10.0
    gap_limit: NonNegative = 1e-4
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    deterministic: bool = False


class SweptPoint(Record):
    """What was found at a point: a plan, or why there is none.

    Attributes:
        cluster: label of one.
        devices: how many of its devices a plan may use.
        samples_per_microbatch: size of a microbatch.
        microbatches: of an iteration.
        plan: its plan's file; null if there is none.
        iteration_time_s: of the plan.
        lower_bound_s: no plan on the chosen devices takes less, of the space that the plan names.
        chosen: the devices that the search could use.
        used: those that the plan uses.
        reason: why there is no plan.
    """

    cluster: Label
    devices: Devices
    samples_per_microbatch: Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
    microbatches: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)]
    plan: PlanName | None = None
    iteration_time_s: NonNegative | None = None
    lower_bound_s: NonNegative | None = None
    chosen: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def point(self) -> Point:
        """Which it is."""
        return Point(self.cluster, self.devices, self.samples_per_microbatch, self.microbatches)

    @model_validator(mode="after")
    def _has_a_plan_or_a_reason(self) -> Self:
        figures = (self.plan, self.iteration_time_s, self.lower_bound_s)
        if self.reason is None and (None in figures or not self.used):
            raise ValueError(
                f"the point {self.point} lacks plan, iteration_time_s, lower_bound_s or used and "
                "gives no reason; remove it, and the sweep solves it again"
            )
        if self.reason is not None and (self.used or set(figures) != {None}):
            raise ValueError(
                f"the point {self.point} has a plan and a reason why there is none; remove it, and "
                "the sweep solves it again"
            )
        return self


class SweepIndex(Record):
    """What a folder of a sweep holds.

    Attributes:
        format: ``pipeplan-sweep/2``.
        model: name of the graph.
        factory: that builds it; null if the graph was read.
        arguments: keyword arguments of the factory.
        graphs: digests of the layer graphs, by samples of a microbatch.
        clusters: digests of the clusters without their prices, by label.
        job: as given; the fields :data:`SWEPT_JOB_FIELDS` say nothing.
        settings: of the searches.
        cost_model: revision (:data:`planner.artifacts.plan.COST_MODEL`) that the times are of.
        points: found so far, in no particular order.
    """

    format: Literal["pipeplan-sweep/2"] = "pipeplan-sweep/2"
    model: str
    factory: str | None = None
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    graphs: dict[str, Digest]
    clusters: dict[Label, Digest]
    job: Job
    settings: SweepSettings
    cost_model: Count
    points: tuple[SweptPoint, ...] = ()

    @model_validator(mode="after")
    def _has_each_point_once(self) -> Self:
        for point, count in Counter(row.point for row in self.points).items():
            if count > 1:
                raise ValueError(f"points: {point} is there {count} times; keep one")
        return self

    @classmethod
    def load(cls, path: str | Path) -> SweepIndex:
        """Read an index.

        Raises:
            PipeplanError: naming every wrong field.
        """
        source = str(path)
        return cls.parse(check_format(read_json(path), FORMAT, source), source)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, atomically."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

    def differences(self, other: SweepIndex) -> Iterator[str]:
        """Why points of another sweep cannot stand beside those of this one; each names a field."""
        for field in ("model", "factory", "arguments", "cost_model"):
            yield from _difference(field, getattr(self, field), getattr(other, field))
        for field in type(self.job).model_fields.keys() - SWEPT_JOB_FIELDS:
            yield from _difference(
                f"job.{field}", getattr(self.job, field), getattr(other.job, field)
            )
        for field in type(self.settings).model_fields:
            mine, theirs = getattr(self.settings, field), getattr(other.settings, field)
            yield from _difference(f"settings.{field}", mine, theirs)
        for samples in self.graphs.keys() & other.graphs.keys():
            if self.graphs[samples] != other.graphs[samples]:
                yield f"graphs.{samples}: another model, or other costs"
        for label in self.clusters.keys() & other.clusters.keys():
            if self.clusters[label] != other.clusters[label]:
                yield f"clusters.{label}: the cluster is another one (in more than its prices)"


def _difference(field: str, mine: Any, theirs: Any) -> Iterator[str]:
    if mine != theirs:
        yield f"{field}: {shorten(mine)} there, {shorten(theirs)} now"
