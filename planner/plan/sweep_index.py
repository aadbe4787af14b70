"""The index of a sweep's folder: its settings, and the result of each point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from planner.errors import shorten
from planner.job import MAX_MICROBATCHES, Job, JsonValue
from planner.plan.runtime_rules import RuntimeRules
from planner.records.document import Count, Record
from planner.records.formats import JsonFile
from planner.space import MOST_TENSOR_PARALLEL
from planner.units import plural

INDEX_NAME = "sweep.json"
"""File name of the index in its folder."""
MAX_SAMPLES = 2**20
MOST_POINTS = 10_000
"""Points of one sweep."""
MOST_KEPT_POINTS = 3 * MOST_POINTS
"""Points of a folder, in which several sweeps may have been."""
SWEPT_JOB_FIELDS = frozenset(
    ("name", "samples_per_microbatch", "microbatches", "model_arguments", "epoch_samples")
)
"""Job fields that a sweep varies, that change no plan, or that the index stores separately."""
LABEL_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}$"
Label = Annotated[str, Field(pattern=LABEL_PATTERN)]
"""Label of a cluster, used in file names."""
PlanName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.json$")]
"""Name of a plan's file in the folder itself."""
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
NonNegative = Annotated[float, Field(ge=0)]
Degree = Annotated[int, Field(ge=1, le=MOST_TENSOR_PARALLEL)]


class Point(NamedTuple):
    """One combination of a sweep.

    Attributes:
        cluster: label of the cluster.
        devices: largest number of devices that a plan may use.
        samples_per_microbatch: microbatch size.
        microbatches: microbatches per iteration.
    """

    cluster: str
    devices: int
    samples_per_microbatch: int
    microbatches: int

    @property
    def plan_name(self) -> str:
        """File name of the point's plan."""
        batch = f"{self.microbatches}x{self.samples_per_microbatch}"
        return f"{self.cluster}-{self.devices}-devices-{batch}.json"

    @property
    def batch(self) -> str:
        """Number and size of the microbatches, such as ``8 x 32``."""
        return f"{self.microbatches} x {self.samples_per_microbatch}"

    def __str__(self) -> str:
        return f"{self.cluster}, {plural(self.devices, 'device')}, {self.batch} samples"


class SweepSettings(Record):
    """Search settings of every point, see :func:`planner.search.solve.solve`.

    Attributes:
        time_limit_s: Time limit per point, including the choice of devices.
        gap_limit: Gap at which a point's search ends.
        seed: Seed of all searches.
        deterministic: Whether the limit is in CP-SAT's deterministic seconds.
    """

    time_limit_s: Annotated[float, Field(gt=0)] = 10.0
    gap_limit: NonNegative = 1e-4
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    deterministic: bool = False


class SweptPoint(Record):
    """The result of a point: a plan, or the reason why there is none.

    Attributes:
        cluster: Label of the cluster.
        devices: Largest number of devices.
        samples_per_microbatch: Microbatch size.
        microbatches: Microbatches per iteration.
        plan: File of the plan; null if there is none.
        iteration_time_s: Iteration time of the plan.
        lower_bound_s: Lower bound on the chosen devices, for plans named in the plan file.
        chosen: Devices available to the search.
        used: Devices that the plan uses.
        degree: Devices of each tensor-parallel group of the plan, a list of numbers where they
            differ; null: there is no plan.
        reason: Why there is no plan.
    """

    cluster: Label
    devices: Annotated[int, Field(ge=1, lt=2**31)]
    samples_per_microbatch: Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
    microbatches: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)]
    plan: PlanName | None = None
    iteration_time_s: NonNegative | None = None
    lower_bound_s: NonNegative | None = None
    chosen: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    degree: Degree | Annotated[tuple[Degree, ...], Field(min_length=2, max_length=16)] | None = None
    reason: str | None = None

    @property
    def point(self) -> Point:
        """The combination that was solved."""
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


class SweepIndex(JsonFile):
    """The contents of a sweep's folder.

    Attributes:
        format: ``pipeplan-sweep/6``.
        model: Name of the model.
        factory: ``module:factory`` that builds it; null if the graph was read from a file.
        arguments: Keyword arguments of the factory.
        graphs: Digests of the layer graphs, by samples per microbatch.
        clusters: Digests of the clusters without prices, by label.
        job: The job; fields in :data:`SWEPT_JOB_FIELDS` are ignored.
        runtime: How the runtime that will train runs the plans.
        settings: Search settings.
        cost_model: Revision of the cost model (:data:`planner.plan.plan.COST_MODEL`) of the times.
        points: Points found so far, unordered.
    """

    format: Literal["pipeplan-sweep/6"] = "pipeplan-sweep/6"
    model: str
    factory: str | None = None
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    graphs: dict[str, Digest]
    clusters: dict[Label, Digest]
    job: Job
    runtime: RuntimeRules
    settings: SweepSettings
    cost_model: Count
    points: Annotated[tuple[SweptPoint, ...], Field(max_length=MOST_KEPT_POINTS)] = ()

    @model_validator(mode="after")
    def _has_each_point_once(self) -> Self:
        for point, count in Counter(row.point for row in self.points).items():
            if count > 1:
                raise ValueError(f"points: {point} is there {count} times; keep one")
        return self

    def differences(self, other: SweepIndex) -> Iterator[str]:
        """Yield each field in which another sweep differs, so that points do not compare.

        Graphs and clusters that only one of them has are no difference.
        """
        mine, theirs = self._compared(), other._compared()
        for field in sorted(mine.keys() & theirs.keys()):
            if mine[field] != theirs[field]:
                yield f"{field}: {shorten(mine[field])} there, {shorten(theirs[field])} now"

    def _compared(self) -> dict[str, Any]:
        """Return what all points of a folder share, by field."""
        nested = {
            "job": {name: v for name, v in dict(self.job).items() if name not in SWEPT_JOB_FIELDS},
            "settings": dict(self.settings),
            "graphs": self.graphs,
            "clusters": self.clusters,
        }
        whole = ("model", "factory", "arguments", "runtime", "cost_model")
        return {name: getattr(self, name) for name in whole} | {
            f"{name}.{key}": value for name, rows in nested.items() for key, value in rows.items()
        }
