"""The trace of a run's synchronisation: each pipeline's times of computation and of waiting."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from planner.plan.plan import Sync
from planner.records.document import MOST_MEASURED_OBJECTS, Count, Record
from planner.records.formats import JsonFile

Seconds = Annotated[float, Field(ge=0, le=1e9)]
WorkerNumber = Annotated[int, Field(ge=0, lt=4096)]


class SyncStep(Record):
    """An iteration of one pipeline rank of a worker.

    Attributes:
        iteration: Iteration, from 1.
        pipeline_rank: Pipeline rank.
        start_s: Start of the iteration, on one clock for all workers.
        compute_s: Time from the start until there is something to synchronise.
        sync_wait_s: Time from then until the worker continues.
        members: Workers that synchronised together, including this one, ascending.
    """

    iteration: Annotated[int, Field(ge=1, lt=2**31)]
    pipeline_rank: Annotated[int, Field(ge=0, lt=4096)] = 0
    start_s: Seconds
    compute_s: Seconds
    sync_wait_s: Seconds
    members: Annotated[tuple[WorkerNumber, ...], Field(min_length=1, max_length=4096)]

    @property
    def asked_s(self) -> float:
        """The moment at which the rank had something to synchronise."""
        return self.start_s + self.compute_s

    @property
    def end_s(self) -> float:
        """The moment at which the rank continued."""
        return self.asked_s + self.sync_wait_s


class SyncTrace(JsonFile):
    """The synchronisation of a run, measured or simulated.

    Attributes:
        format: ``pipeplan-sync-trace/2``.
        sync: Strategy and options.
        pipelines_per_node: Pipelines that share a node; workers are numbered node by node.
        parameter_bytes: Bytes synchronised per pipeline rank.
        workers: Rows of each worker, in order of time.
    """

    MOST_OBJECTS: ClassVar[int] = MOST_MEASURED_OBJECTS
    format: Literal["pipeplan-sync-trace/2"] = "pipeplan-sync-trace/2"
    sync: Sync
    pipelines_per_node: Annotated[int, Field(ge=1, le=4096)] = 1
    parameter_bytes: Annotated[tuple[Count, ...], Field(min_length=1, max_length=4096)]
    workers: Annotated[tuple[tuple[SyncStep, ...], ...], Field(min_length=1, max_length=4096)]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for worker, rows in enumerate(self.workers):
            for index, row in enumerate(rows):
                field = f"workers[{worker}][{index}]"
                if list(row.members) != sorted(set(row.members)):
                    raise ValueError(f"{field}.members: {row.members} do not ascend; sort them")
                if worker not in row.members:
                    raise ValueError(f"{field}.members: worker {worker} itself is missing; add it")
                if row.members[-1] >= len(self.workers):
                    raise ValueError(
                        f"{field}.members: there is no worker {row.members[-1]}; workers has "
                        f"{len(self.workers)} rows"
                    )
                if row.pipeline_rank >= len(self.parameter_bytes):
                    raise ValueError(
                        f"{field}.pipeline_rank: {row.pipeline_rank}, but parameter_bytes has "
                        f"{len(self.parameter_bytes)} entries"
                    )
        return self
