"""The plan file: stages, devices, orders of operations and predictions. Loading it runs no code."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.job import MAX_MICROBATCHES, Job, JsonValue
from planner.model.graph_record import GraphRecord, structure_digest
from planner.model.layer_graph import LayerGraph
from planner.plan.certificate import Proof
from planner.plan.operations import Operation, parse_order
from planner.plan.problem import ModelSource, Problem
from planner.plan.runtime_rules import RuntimeBehaviour, RuntimeRules
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.records.document import (
    MOST_ENTRIES,
    Count,
    Record,
    digest_of_data,
    left_out,
)
from planner.records.formats import JsonFile
from planner.space import BoundCovers, Space
from planner.units import format_seconds, listed, plural

COST_MODEL = 3
"""The revision of the cost model and the simulator. It rises whenever either predicts other times
or bytes for some plan: commands predict figures of another revision again when they read a plan
(:func:`planner.prediction.load_plan`), and bounds of another revision do not hold."""

BUCKET_MIB = 25.0
"""Default size of a bucket of gradients, as in torch's DistributedDataParallel."""
FUSION_MIB = 64.0
"""Default size of a bucket that is filled with gradients of several stages."""
_SIZES = {"all_reduce": ("bucket_mib", BUCKET_MIB), "fused": ("fusion_mib", FUSION_MIB)}
"""Strategies that overlap, with the option for the size of their buckets and its default."""
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# A sum over layers and microbatches of counts below 2**63; a float can still represent it.
TotalBytes = Annotated[int, Field(ge=0, lt=2**120)]


class PlannedModel(Record):
    """The model of a plan.

    Attributes:
        name: Name of the model.
        factory: ``module:factory`` or ``hf:NAME`` that builds it; null if unknown.
        arguments: Keyword arguments of the factory.
        graph_digest: Digest of the layer graph, ``sha256:…``.
        graph: The layer graph.
    """

    name: str
    factory: str | None
    arguments: dict[str, JsonValue]
    graph_digest: str
    graph: GraphRecord


class Stage(Record):
    """A set of layers on one or more devices.

    Attributes:
        index: Number of the stage, from 0; edges never lead to an earlier stage.
        layers: Names of its layers, which run in the order of the layer graph.
        devices: Devices that hold it (replicas); each microbatch runs on one of them.
        recompute: Layers that keep only their inputs and run again in the backward.
        offload: Layers whose stash is copied to the host after the forward and back before the
            backward.
    """

    index: Count
    layers: Annotated[tuple[str, ...], Field(min_length=1, max_length=MOST_ENTRIES)]
    devices: Annotated[tuple[str, ...], Field(min_length=1, max_length=MOST_ENTRIES)]
    recompute: Annotated[tuple[str, ...], Field(max_length=MOST_ENTRIES)] = ()
    offload: Annotated[tuple[str, ...], Field(max_length=MOST_ENTRIES)] = ()


class Sync(Record):
    """The synchronisation strategy of the replicas.

    Attributes:
        strategy: Name of the strategy; see docs/synchronisation.md.
        options: Options of the strategy.
    """

    strategy: str = "all_reduce"
    options: dict[str, JsonValue] = Field(default_factory=dict)


def overlaps_reductions(space: Space, sync: Sync, behaviour: RuntimeBehaviour) -> bool:
    """Return whether gradients are reduced in buckets while the last backwards still run.

    The strategies ``all_reduce`` and ``fused`` do so if the runtime can and the freedoms of the job
    allow it, the first one unless it says otherwise. Times under other strategies are simulated
    apart (:mod:`planner.sync.simulation`).
    """
    said = sync.options.get("overlap", space.overlap_reduction)
    return behaviour.reduction == "bucket" and sync.strategy in _SIZES and bool(said)


def within(space: Space, sync: Sync) -> Sync:
    """Return a strategy that says not to overlap where it leaves that open and may not."""
    if sync.strategy != "all_reduce" or "overlap" in sync.options or space.overlap_reduction:
        return sync
    return Sync(strategy=sync.strategy, options={**sync.options, "overlap": False})


def overlapped_bucket_bytes(space: Space, sync: Sync, behaviour: RuntimeBehaviour) -> float | None:
    """Return the size of the buckets that are reduced while the last backwards still run.

    Args:
        space: the freedoms of the job.
        sync: the strategy of synchronisation.
        behaviour: of the runtime.

    Returns:
        Bytes; None if gradients are reduced at once, after the last backward.

    Raises:
        PipeplanError: if the strategy's size is no number.
    """
    if not overlaps_reductions(space, sync, behaviour):
        return None
    option, default = _SIZES[sync.strategy]
    mib = sync.options.get(option, default)
    if isinstance(mib, bool) or not isinstance(mib, int | float):
        raise PipeplanError(f"sync.options.{option}: {mib!r} is not a number of MiB")
    return mib * 2**20


class DevicePrediction(Record):
    """Simulation results of one device in one iteration.

    Attributes:
        busy_s: Time spent computing.
        peak_memory_bytes: Most memory held at any moment.
    """

    busy_s: NonNegative
    peak_memory_bytes: TotalBytes


class TimeProvenance(Record):
    """Fractions of a predicted time by the source of the figures behind it; they sum to 1.

    :mod:`planner.simulation.time_provenance` defines what counts as which.

    Attributes:
        measured: Fraction from measured costs.
        datasheet: Fraction from vendors' datasheets.
        assumed: Fraction from assumptions, such as efficiencies.
    """

    measured: Share
    datasheet: Share
    assumed: Share


class LengthPrediction(Record):
    """Simulated times of a job's first iterations, where microbatches have several lengths.

    Attributes:
        iterations: Number of iterations.
        expected_s: Mean of their times.
        percentile_95_s: 95th percentile of their times, linearly interpolated.
        worst_s: Longest of their times.
    """

    iterations: Annotated[int, Field(ge=1)]
    expected_s: NonNegative
    percentile_95_s: NonNegative
    worst_s: NonNegative


class Predicted(Record):
    """Simulation results of a plan.

    Attributes:
        iteration_time_s: Simulated iteration time, including all-reduces and optimizer steps.
        lower_bound_s: Proved lower bound for all plans named by ``provenance.bound_covers``; 0 if
            unknown.
        gap: iteration time / lower bound - 1; null without a bound.
        bubble: Idle fraction of the devices used.
        devices: Results per device.
        time_provenance: Fractions of the time by source; null if nothing takes time, or in plans of
            versions without it.
        lengths: Times of iterations whose microbatches have several lengths; all else is then of
            the mean iteration, in which every microbatch takes the mean time and holds what the
            longest does. Null if microbatches have one length.
    """

    iteration_time_s: NonNegative
    lower_bound_s: NonNegative
    gap: NonNegative | None
    bubble: Share
    devices: dict[str, DevicePrediction]
    time_provenance: TimeProvenance | None = None
    lengths: LengthPrediction | None = left_out(None)


def gap(iteration_time_s: float, lower_bound_s: float) -> float | None:
    """Return how far a plan may be from the best one: time / bound - 1; None without a bound.

    A bound so small that the quotient overflows counts as none.
    """
    if lower_bound_s <= 0 or not math.isfinite(iteration_time_s / lower_bound_s):
        return None
    return max(0.0, iteration_time_s / lower_bound_s - 1)


class Provenance(Record):
    """How a plan was made, in enough detail to make it again.

    Attributes:
        pipeplan: Version of Pipeplan.
        ortools: Version of OR-Tools; null if unused.
        seed: Seed of the search.
        workers: Number of solver threads.
        limit: Limit of the search, such as ``wall 30 s``.
        solver: Method that found the plan.
        bound_covers: Plans that the lower bound covers.
        problem_digest: Digest of the problem (:attr:`Problem.digest`) for which the bound was
            proved; it does not hold for other problems.
        cost_model: Revision of the cost model (:data:`COST_MODEL`) behind the predictions and the
            bound.
    """

    pipeplan: str
    ortools: str | None
    seed: int
    workers: int
    limit: str
    solver: str
    bound_covers: BoundCovers
    cost_model: Count
    problem_digest: str | None = None


class RankPlace(NamedTuple):
    """The place of a rank in a plan.

    Attributes:
        replica: of a stage, as stages list it: a device's or a group's name.
        member: number of the rank in its tensor-parallel group; 0 without one.
        members: ranks of the group; 1 without one.
    """

    replica: str
    member: int
    members: int


class Plan(JsonFile):
    """A complete plan: stages, devices, orders, predictions and the inputs they were made from.

    Attributes:
        format: ``pipeplan/8``.
        model: The model.
        cluster: The cluster it was planned for.
        job: The job it was planned for.
        runtime: How the runtime that will train runs it, which its predictions follow.
        stages: Stages in order.
        microbatches: Microbatches per iteration.
        orders: Operations of each device in order, such as ``2F0`` (stage 2, forward, microbatch
            0), separated by spaces; F forward, B whole backward, I and W input and weight gradient
            of a split backward.
        ranks: Device of each rank; with tensor-parallel groups the group of as many ranks in a row
            as it has devices, of which the first is on its first device, see
            :attr:`rank_devices`.
        sync: Synchronisation strategy of the replicas.
        predicted: Simulation results.
        provenance: How the plan was made.
        proof: What shows that the lower bound holds; null without a bound, and in plans of older
            versions.
        tensor_parallel: Groups of devices that stages, orders, ranks and predictions name instead
            of devices; null: they name devices.
    """

    format: Literal["pipeplan/8"] = "pipeplan/8"
    model: PlannedModel
    cluster: Cluster
    job: Job
    runtime: RuntimeRules
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=MOST_ENTRIES)]
    microbatches: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)]
    orders: dict[str, str]
    ranks: Annotated[tuple[str, ...], Field(max_length=MOST_ENTRIES)]
    sync: Sync = Field(default_factory=Sync)
    predicted: Predicted
    provenance: Provenance
    proof: Proof | None = None
    tensor_parallel: TensorParallel | None = None

    def __repr__(self) -> str:
        """Return what the plan is of, in a line."""
        proved = "no bound" if self.predicted.gap is None else f"gap {self.predicted.gap:.2%}"
        sizes = (
            plural(len(self.stages), "stage"),
            plural(self.world_size, "device"),
            plural(self.microbatches, "microbatch", "es"),
        )
        return (
            f"<Plan: {self.model.name} on {self.cluster.name}, {', '.join(sizes)}, "
            f"iteration {format_seconds(self.predicted.iteration_time_s)}, {proved}>"
        )

    @model_validator(mode="after")
    def _put_layers_in_order(self) -> Self:
        """List the layers of each stage as they run, however a file lists them."""
        place = {name: position for position, name in enumerate(self.layers)}

        def in_order(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(sorted(names, key=lambda name: place.get(name, len(place))))

        stages = tuple(
            stage.model_copy(
                update={
                    "layers": in_order(stage.layers),
                    "recompute": in_order(stage.recompute),
                    "offload": in_order(stage.offload),
                }
            )
            for stage in self.stages
        )
        self.__dict__["stages"] = stages  # The record is frozen.
        return self

    @property
    def problem(self) -> Problem:
        """The problem that the plan solves: that of its groups, if stages have any as devices.

        Raises:
            PipeplanError: if the groups are none of the cluster's, or the model has no such split.
        """
        single, parallel = self.single_device_problem, self.tensor_parallel
        return single if parallel is None else grouped_problem(single, parallel)

    @property
    def single_device_problem(self) -> Problem:
        """The same model, cluster and job, whatever the plan's groups."""
        return Problem(
            graph=LayerGraph.from_record(self.model.graph),
            cluster=self.cluster,
            job=self.job,
            source=ModelSource(self.model.factory, dict(self.model.arguments)),
            runtime=self.runtime,
        )

    @property
    def on_groups(self) -> Plan:
        """The plan on a cluster whose devices are its groups; itself if it has none."""
        # Plans that kept themselves could not be compared.
        return self if self.tensor_parallel is None else self._on_groups

    @cached_property
    def _on_groups(self) -> Plan:
        return self.of_problem(self.problem, None)

    def of_problem(self, problem: Problem, parallel: TensorParallel | None) -> Plan:
        """Return the plan with the graph, the cluster and the job of a problem.

        Args:
            problem: with the plan's groups as devices, or of single devices.
            parallel: the groups, if the problem is of single devices and the plan has groups.
        """
        graph = {"graph": problem.graph.record, "graph_digest": problem.graph.digest}
        return self.model_copy(
            update={
                "model": self.model.model_copy(update=graph),
                "cluster": problem.cluster,
                "job": problem.job,
                "tensor_parallel": parallel,
            }
        )

    def digests_in(self, space: Space) -> tuple[str, ...]:
        """Return the digests with which a bound on a space holds for this plan.

        A bound for one size of groups is for the groups of the plan. One for any size is for the
        model and the cluster, which say what groups there may be.
        """
        is_open = space.tensor_parallel == "any"
        return (self.single_device_problem if is_open else self.problem).digests_in(space)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Numbers of devices that hold a replica of a stage together, ascending; 1 of no groups."""
        return (1,) if self.tensor_parallel is None else self.tensor_parallel.degrees

    @property
    def degree(self) -> int:
        """The number of devices that hold each replica of a stage together; 1 without groups.

        Raises:
            PipeplanError: if it differs from stage to stage.
        """
        if len(self.degrees) > 1:
            numbers = listed(self.degrees)
            raise PipeplanError(
                f"tensor_parallel.groups: they have {numbers} devices, and this takes groups of "
                "one size only so far; plan again with tensor_parallel = one of these"
            )
        return self.degrees[0]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        groups = self._devices_of_groups
        return sum(len(groups.get(name, (name,))) for name in self.ranks)

    def members(self, name: str) -> tuple[str, ...]:
        """Return the devices of a replica of a stage, in the order of their ranks.

        Args:
            name: as stages list it: a group's, or without groups a device's.
        """
        if self.tensor_parallel is None:
            return (name,)
        return self._devices_of_groups[name]

    @cached_property
    def _devices_of_groups(self) -> dict[str, tuple[str, ...]]:
        parallel = self.tensor_parallel
        return {} if parallel is None else {group.name: group.devices for group in parallel.groups}

    @property
    def rank_devices(self) -> tuple[str, ...]:
        """The device of each rank, of which each group's follow each other."""
        return tuple(device for name in self.ranks for device in self.members(name))

    def ranks_of(self, name: str) -> range:
        """Return the ranks of a replica of a stage, as stages list it."""
        return self._ranks_of[name]

    def place_of(self, rank: int) -> RankPlace:
        """Return the replica of a stage that a rank is part of, and its number there."""
        return self._places[rank]

    @cached_property
    def _ranks_of(self) -> dict[str, range]:
        found, first = {}, 0
        for name in self.ranks:
            found[name] = range(first, first + len(self.members(name)))
            first = found[name].stop
        return found

    @cached_property
    def _places(self) -> tuple[RankPlace, ...]:
        return tuple(
            RankPlace(name, number, len(self.members(name)))
            for name in self.ranks
            for number in range(len(self.members(name)))
        )

    @property
    def behaviour(self) -> RuntimeBehaviour:
        """How the runtime runs this plan."""
        return self.runtime.behaviour_on(stage.devices for stage in self.stages)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the model's layers, in executable order."""
        return tuple(layer.name for layer in self.model.graph.layers)

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced during the last backwards (:func:`overlaps_reductions`)."""
        return overlaps_reductions(self.job.space, self.sync, self.behaviour)

    @property
    def bucket_bytes(self) -> float | None:
        """The size of a bucket of gradients (:func:`overlapped_bucket_bytes`); None without any."""
        return overlapped_bucket_bytes(self.job.space, self.sync, self.behaviour)

    @cached_property
    def execution_digest(self) -> str:
        """SHA-256 of what the executor runs: layers, stages, orders and ranks.

        Costs are left out, so that a plan and its calibrated copy, which run the same, have the
        same digest; only timelines of equal digests can be compared.
        """
        parallel = self.tensor_parallel
        groups = {} if parallel is None else {"tensor_parallel": parallel.model_dump(mode="json")}
        return digest_of_data(
            {
                "graph": structure_digest(self.model.graph),
                "stages": [_run_as(stage) for stage in self.stages],
                "microbatches": self.microbatches,
                "orders": {device: text.split() for device, text in self.orders.items()},
                "ranks": self.ranks,
                **groups,
            }
        )

    def lengths_of(self, step: int) -> tuple[int, ...]:
        """Return the length of each microbatch of a training step in tokens.

        Args:
            step: its number, from 1.

        Returns:
            Empty if all microbatches are as long as the model's own batch.
        """
        lengths = self.job.lengths
        if lengths is None:
            return ()
        return tuple(lengths.tokens[k] for k in lengths.of_iteration(step, self.microbatches))

    def parsed_orders(self) -> dict[str, tuple[Operation, ...]]:
        """Return the order of operations of every device.

        Raises:
            PipeplanError: naming each word that is not an operation.
        """
        return {
            device: parse_order(text, f"orders[{device!r}]") for device, text in self.orders.items()
        }


def _run_as(stage: Stage) -> dict[str, Any]:
    """Return what the executor runs of a stage; without offload as older versions had it."""
    return stage.model_dump(mode="json", exclude=None if stage.offload else {"offload"})
