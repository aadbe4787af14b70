"""The plan: which device holds which layers and runs what when. Loading one runs no code."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.artifacts.cluster import Cluster
from planner.artifacts.document import Count, Record, digest_of_data, read_json, write_atomically
from planner.artifacts.formats import check_format
from planner.artifacts.graph_record import GraphRecord, structure_digest
from planner.artifacts.job import MAX_MICROBATCHES, Job, JsonValue
from planner.artifacts.layer_graph import LayerGraph
from planner.artifacts.operations import Operation, parse_order
from planner.artifacts.problem import ModelSource, Problem

FORMAT = "pipeplan/2"
COST_MODEL = 1
"""The revision of the cost model and the simulator. It rises whenever either predicts another time
or other bytes for some plan: figures of another revision are predicted anew when a plan is read,
and bounds of another prove nothing."""
OTHER_COST_MODEL = "nothing: its bound was proved under another revision of the cost model"
logger = logging.getLogger(__name__)

NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# A sum over layers and microbatches of counts below 2**63; a float can still stand for it.
TotalBytes = Annotated[int, Field(ge=0, lt=2**120)]


class PlannedModel(Record):
    """The model a plan is for.

    Attributes:
        name: of the layer graph.
        factory: ``module:factory`` or ``hf:NAME`` that builds it; null if it is not known.
        arguments: keyword arguments of the factory.
        graph_digest: of the layer graph, ``sha256:…``.
        graph: the layer graph itself.
    """

    name: str
    factory: str | None
    arguments: dict[str, JsonValue]
    graph_digest: str
    graph: GraphRecord


class Stage(Record):
    """A set of layers on some devices.

    Attributes:
        index: from 0; no edge of the graph goes from a later stage to an earlier one.
        layers: by name.
        devices: that hold it, its replicas; each microbatch runs on one of them.
        recompute: those of its layers that keep only their inputs and run again in the backward.
    """

    index: Count
    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    devices: Annotated[tuple[str, ...], Field(min_length=1)]
    recompute: tuple[str, ...] = ()


class Sync(Record):
    """How the replicas of a stage agree on their gradients.

    Attributes:
        strategy: by name; docs/synchronisation.md says what each does.
        options: of the strategy.
    """

    strategy: str = "all_reduce"
    options: dict[str, JsonValue] = Field(default_factory=dict)


class DevicePrediction(Record):
    """What the simulator expects of one device in one iteration.

    Attributes:
        busy_s: that it computes.
        peak_memory_bytes: the most that it holds at any moment.
    """

    busy_s: NonNegative
    peak_memory_bytes: TotalBytes


class RestsOn(Record):
    """What the figures behind a predicted time are, as shares of its critical path; they sum to 1.

    :mod:`planner.rests_on` says what counts as which.

    Attributes:
        measured: of costs that were measured.
        datasheet: of figures that a vendor publishes.
        assumed: of assumptions, such as efficiencies.
    """

    measured: Share
    datasheet: Share
    assumed: Share


class Predicted(Record):
    """The simulator's figures.

    Attributes:
        iteration_time_s: of the simulated iteration, its all-reduces and optimizer steps included.
        lower_bound_s: no plan that ``provenance.bound_covers`` names takes less under the cost
            model; 0 where no bound is known.
        gap: iteration time / lower bound - 1; null where no bound is known.
        bubble: the idle share of the devices used.
        devices: by name.
        rests_on: null where nothing takes time, and in plans of versions that did not tell it.
    """

    iteration_time_s: NonNegative
    lower_bound_s: NonNegative
    gap: NonNegative | None
    bubble: Share
    devices: dict[str, DevicePrediction]
    rests_on: RestsOn | None = None


class Provenance(Record):
    """What made the plan, enough to make it again.

    Attributes:
        pipeplan: its version.
        ortools: the solver's version; null where none was needed.
        seed: of the search.
        workers: threads of the solver.
        limit: of the search, such as ``wall 30 s``.
        solver: what found the plan.
        bound_covers: the plans that the proven bound holds for.
        problem_digest: of the problem that the bound was proved for (:attr:`Problem.digest`);
            a bound for any other proves nothing.
        cost_model: the revision (:data:`COST_MODEL`) that predicted the plan and proved the bound.
    """

    pipeplan: str
    ortools: str | None
    seed: int
    workers: int
    limit: str
    solver: str
    bound_covers: str
    cost_model: Count
    problem_digest: str | None = None


class Plan(Record):
    """A complete answer: stages, devices, orders and predictions, with all they were made from.

    Attributes:
        format: ``pipeplan/2``.
        model: that is trained.
        cluster: that it was planned for.
        job: that it was planned for.
        stages: in order.
        microbatches: of an iteration.
        orders: what each device runs, by its name: operations such as ``2F0`` (stage 2, forward,
            microbatch 0) with spaces between; F forward, B backward, I and W its two halves
            (input and weight gradient).
        ranks: the device of each rank of the executor.
        sync: how replicas agree.
        predicted: the simulator's figures.
        provenance: what made the plan.
    """

    format: Literal["pipeplan/2"] = "pipeplan/2"
    model: PlannedModel
    cluster: Cluster
    job: Job
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    microbatches: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)]
    orders: dict[str, str]
    ranks: tuple[str, ...]
    sync: Sync = Field(default_factory=Sync)
    predicted: Predicted
    provenance: Provenance

    @classmethod
    def parse(cls, data: Any, source: str = "plan") -> Plan:
        """Check the form of plain JSON data; ``planner.verify`` checks what it says.

        A plan that another revision of the cost model predicted is predicted anew and loses its
        bound; a warning of this module's logger tells of it.

        Raises:
            PipeplanError: naming every wrong field, or a format this version does not read.
        """
        plan = super().parse(check_format(data, FORMAT, source), source)
        return plan if plan.provenance.cost_model == COST_MODEL else _predicted_anew(plan, source)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file."""
        return cls.parse(read_json(path), str(path))

    def save(self, path: str | Path) -> None:
        """Verify the plan, then write it as JSON, atomically.

        Raises:
            PipeplanError: if the plan does not hold; nothing is written then.
        """
        from planner.verifier import require_valid

        require_valid(self)
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

    @property
    def problem(self) -> Problem:
        """The problem the plan answers."""
        return Problem(
            graph=LayerGraph.from_record(self.model.graph),
            cluster=self.cluster,
            job=self.job,
            source=ModelSource(self.model.factory, dict(self.model.arguments)),
        )

    @cached_property
    def execution_digest(self) -> str:
        """SHA-256 of what the executor runs: layers, stages, orders and ranks.

        Costs are left out, so that a plan and its calibrated copy, which run the same, have the
        same; only timelines of equal digests can be compared.
        """
        return digest_of_data(
            {
                "graph": structure_digest(self.model.graph),
                "stages": [stage.model_dump(mode="json") for stage in self.stages],
                "microbatches": self.microbatches,
                "orders": {device: text.split() for device, text in self.orders.items()},
                "ranks": self.ranks,
            }
        )

    def parsed_orders(self) -> dict[str, tuple[Operation, ...]]:
        """The order of operations of every device.

        Raises:
            PipeplanError: naming each word that is not an operation.
        """
        return {
            device: parse_order(text, f"orders[{device!r}]") for device, text in self.orders.items()
        }


def _predicted_anew(plan: Plan, source: str) -> Plan:
    """The plan with the figures of this version's cost model, and without a bound.

    One whose form does not hold stays as it is: whoever verifies it is told why.
    """
    from planner.verifier import predict, replay_whole

    timeline = replay_whole(plan)
    if timeline is None:
        return plan
    predicted, before = predict(timeline, 0.0), plan.predicted
    time, earlier = f"{predicted.iteration_time_s:.6g}", f"{before.iteration_time_s:.6g}"
    logger.warning(
        "%s: predicted anew, as another revision of the cost model made it: iteration_time_s %s; "
        "its bound is dropped, `pipeplan plan --warm-start` proves another",
        source,
        f"stays {time}" if time == earlier else f"is {time}, was {earlier}",
    )
    provenance = plan.provenance.model_copy(
        update={
            "cost_model": COST_MODEL,
            "problem_digest": timeline.pipeline.problem.digest,
            "bound_covers": OTHER_COST_MODEL,
        }
    )
    return plan.model_copy(update={"predicted": predicted, "provenance": provenance})
