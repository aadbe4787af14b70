"""Transfers between neighbouring stages: a delay, or an interval on every link they take."""

from __future__ import annotations

from collections.abc import Iterator

from ortools.sat.python import cp_model

from planner.artifacts.operations import Operation
from planner.costs.placement import Transfer
from planner.schedule.model.operations import Operations

Message = tuple[Operation, str, str]
"""What is sent, from which device to which; gradients by their kind in the model, I or B."""


class Transfers:
    """Every activation and gradient on its way.

    Attributes:
        start: when each message that holds links sets off.
    """

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.model = operations.model
        self.start: dict[Message, cp_model.IntVar] = {}
        self._on_link: dict[tuple[int, int], list[cp_model.IntervalVar]] = {}
        for producer, consumer in self._pairs():
            self._connect(producer, consumer)
        for intervals in self._on_link.values():
            if len(intervals) > 1:
                self.model.add_no_overlap(intervals)

    def _pairs(self) -> Iterator[tuple[Operation, Operation]]:
        """Operations of neighbouring stages that wait for each other; on the last stage its own."""
        gradient, last = self.operations.gradient, len(self.operations.pipeline.stages) - 1
        for stage, microbatch in sorted(self.operations.owner):
            forward = Operation(stage, "F", microbatch)
            backward = Operation(stage, gradient, microbatch)
            if stage < last:
                yield forward, Operation(stage + 1, "F", microbatch)
            else:
                yield forward, backward
            if stage > 0:
                yield backward, Operation(stage - 1, gradient, microbatch)
            if gradient == "I":
                yield backward, Operation(stage, "W", microbatch)

    def _connect(self, producer: Operation, consumer: Operation) -> None:
        operations = self.operations
        if producer.stage == consumer.stage:
            self.model.add(operations.start[consumer] >= operations.end[producer])
            return
        for source in operations.candidates(producer.stage, producer.microbatch):
            for target in operations.candidates(consumer.stage, consumer.microbatch):
                self._connect_pair(producer, consumer, source, target)

    def _connect_pair(
        self, producer: Operation, consumer: Operation, source: str, target: str
    ) -> None:
        transfer = self._transfer(producer, source, target)
        ticks = int(transfer.seconds)
        literals = self._both(producer, source, consumer, target)
        start, end = self.operations.start, self.operations.end
        if not transfer.links or ticks == 0:
            self.model.add(start[consumer] >= end[producer] + ticks).only_enforce_if(literals)
            return
        name = f"{producer} {source}>{target}"
        begin = self.model.new_int_var(0, self.operations.horizon, name)
        self.start[producer, source, target] = begin
        self.model.add(begin >= end[producer]).only_enforce_if(literals)
        self.model.add(start[consumer] >= begin + ticks).only_enforce_if(literals)
        interval = self._interval(begin, ticks, literals, name)
        for link in transfer.links:
            self._on_link.setdefault(link, []).append(interval)

    def _transfer(self, producer: Operation, source: str, target: str) -> Transfer:
        pipeline = self.operations.pipeline
        if producer.kind == "F":
            return pipeline.forward_transfer(producer.stage, source, target)
        return pipeline.backward_transfer(producer.stage, source, target)

    def _interval(
        self, begin: cp_model.IntVar, ticks: int, literals: list[cp_model.BoolVarT], name: str
    ) -> cp_model.IntervalVar:
        if not literals:
            return self.model.new_fixed_size_interval_var(begin, ticks, name)
        present = self.model.new_bool_var(f"used {name}")
        self.model.add_bool_or([present, *(~literal for literal in literals)])
        for literal in literals:
            self.model.add_implication(present, literal)
        return self.model.new_optional_fixed_size_interval_var(begin, ticks, present, name)

    def _both(
        self, producer: Operation, source: str, consumer: Operation, target: str
    ) -> list[cp_model.BoolVarT]:
        """Literals that a pair of replicas is the chosen one; empty without a choice."""
        if not self.operations.free:
            return []
        pair = (
            (producer.stage, producer.microbatch, source),
            (consumer.stage, consumer.microbatch, target),
        )
        return [
            self.operations.runs_on[key]  # type: ignore[misc]
            for key in pair
            if len(self.operations.candidates(key[0], key[1])) > 1
        ]
