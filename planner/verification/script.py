"""What a device does in turn: operations, and the exchanges of docs/replay.md between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.plan.operations import Operation
from planner.plan.runtime_rules import RuntimeBehaviour

Message = Operation
"""A message is named after the operation that needs it; a gradient after the whole backward."""
Entry = Operation | list[Message]
"""An operation to run, or messages to exchange."""


@dataclass(frozen=True)
class Scripts:
    """The scripts of all devices of a plan.

    Attributes:
        rules: of the runtime.
        last: number of the last stage.
        runs_on: device of each stage and microbatch.
        leaves_device: whether a message has bytes and goes to another device.
    """

    rules: RuntimeBehaviour
    last: int
    runs_on: Mapping[tuple[int, int], str]
    leaves_device: Callable[[Message], bool]

    def made_by(self, operation: Operation) -> Message | None:
        """Return the message that an operation makes, even if it stays on the device."""
        stage, kind, microbatch = operation
        if kind == "F" and stage < self.last:
            return Operation(stage + 1, "F", microbatch)
        if kind in "BI" and stage > 0:
            return Operation(stage - 1, "B", microbatch)
        return None

    def needed_by(self, operation: Operation) -> Message | None:
        """Return the message that an operation needs, even if it stays on the device."""
        stage, kind, microbatch = operation
        if kind == "F" and stage > 0:
            return operation
        if kind in "BI" and stage < self.last:
            return Operation(stage, "B", microbatch)
        return None

    def source(self, message: Message) -> str:
        """Return the device that sends a message."""
        stage, kind, microbatch = message
        return self.runs_on[stage - 1 if kind == "F" else stage + 1, microbatch]

    def of(self, order: Sequence[Operation]) -> list[Entry]:
        """Return the script of a device."""
        entries: list[Entry] = []
        sent: list[Message] = []
        number = 0
        while number < len(order):
            size = 2 if self._is_pair(order[number : number + 2]) else 1
            together = order[number : number + size]
            needed = self._in_turn(self.rules.receive, map(self.needed_by, together))
            entries += [*self._exchanges(sent, needed), *together]
            sent = self._in_turn(self.rules.send, map(self.made_by, together))
            number += size
        return [*entries, *self._exchanges(sent, [])]

    def _is_pair(self, operations: Sequence[Operation]) -> bool:
        kinds = [operation.kind for operation in operations]
        if self.rules.exchange != "pairs" or kinds not in (["F", "B"], ["F", "I"]):
            return False
        forward, backward = operations
        return forward.microbatch != backward.microbatch or forward.stage == self.last

    def _in_turn(self, rule: str, messages: Iterable[Message | None]) -> list[Message]:
        """Return the messages that a device waits for between operations: those that block."""
        if rule != "blocking":
            return []
        return [message for message in messages if message and self.leaves_device(message)]

    def _exchanges(self, sent: list[Message], needed: list[Message]) -> list[list[Message]]:
        rule = self.rules.exchange
        partners = {self.runs_on[m.stage, m.microbatch] for m in sent}
        partners |= set(map(self.source, needed))
        if rule in ("together", "pairs") or (rule == "neighbour" and len(partners) == 1):
            return [[*sent, *needed]] if sent or needed else []
        return [row for row in (sent, needed) if row]
