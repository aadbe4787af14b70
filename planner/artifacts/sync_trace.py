"""The trace of a run's synchronisation: when each pipeline computed, waited, and with whom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from planner.artifacts.document import Count, Record, read_json, write_atomically
from planner.artifacts.formats import check_format
from planner.artifacts.plan import Sync

FORMAT = "pipeplan-sync-trace/1"
Seconds = Annotated[float, Field(ge=0, le=1e9)]
WorkerNumber = Annotated[int, Field(ge=0, lt=4096)]


class SyncStep(Record):
    """An iteration of a worker at one place of its pipeline.

    Attributes:
        iteration: from 1.
        key: the place.
        start_s: of the iteration, on one clock for all workers.
        compute_s: from there until the place has something to synchronise.
        sync_wait_s: from there until it may go on.
        members: the workers that synchronised together, itself among them, ascending.
    """

    iteration: Annotated[int, Field(ge=1, lt=2**31)]
    key: Annotated[int, Field(ge=0, lt=4096)] = 0
    start_s: Seconds
    compute_s: Seconds
    sync_wait_s: Seconds
    members: Annotated[tuple[WorkerNumber, ...], Field(min_length=1, max_length=4096)]

    @property
    def asked_s(self) -> float:
        """When it had something to synchronise."""
        return self.start_s + self.compute_s

    @property
    def end_s(self) -> float:
        """When it could go on."""
        return self.asked_s + self.sync_wait_s


class SyncTrace(Record):
    """What a run measured, or a simulation foretells.

    Attributes:
        format: ``pipeplan-sync-trace/1``.
        sync: strategy and options.
        pipelines_per_node: that share a node; workers are numbered node by node.
        parameter_bytes: that a place synchronises, by key.
        workers: rows of each worker, in order of time.
    """

    format: Literal["pipeplan-sync-trace/1"] = "pipeplan-sync-trace/1"
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
                if row.key >= len(self.parameter_bytes):
                    raise ValueError(
                        f"{field}.key: {row.key}, but parameter_bytes has "
                        f"{len(self.parameter_bytes)} entries"
                    )
        return self

    @classmethod
    def parse(cls, data: Any, source: str = "sync trace") -> Self:
        """Check the form of plain JSON data.

        Raises:
            PipeplanError: naming every wrong field, or a format this version does not read.
        """
        return super().parse(check_format(data, FORMAT, source), source)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a trace file."""
        return cls.parse(read_json(path), str(path))

    def save(self, path: str | Path) -> None:
        """Write it as JSON, atomically."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")
