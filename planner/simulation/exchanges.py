"""When a message may set off and which messages a device waits for: the rules of a runtime.

Between two operations a device has a row of exchanges. It posts the messages of one together, and
goes on once all of them have arrived. A message sets off when both ends have posted it. An end that
overlaps is in no exchange: the sender posts at the end of the operation that made the message, the
receiver before everything else.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Kind, Operation, Orders
from planner.plan.runtime_rules import RuntimeBehaviour

Message = Operation
"""A message by the operation that needs it; of a gradient, by the whole backward."""
Exchange = Sequence[Message]
Owner = Mapping[tuple[int, int], str]


@dataclass
class Exchanges:
    """The exchanges of all devices, and how far each has come.

    Attributes:
        sends_block: whether senders post in exchanges.
        posts: that a message needs to set off.
        ends: source and target of each message that has bytes and leaves its device.
        after: the exchanges of a device after an operation, and by its name before the first.
    """

    sends_block: bool
    posts: int
    ends: Mapping[Message, tuple[str, str]]
    after: Mapping[Operation | str, Sequence[Exchange]]
    _posted: Counter[Message] = field(default_factory=Counter)
    _left: defaultdict[str, deque[Exchange]] = field(default_factory=lambda: defaultdict(deque))
    _awaited: defaultdict[str, set[Message]] = field(default_factory=lambda: defaultdict(set))

    def is_waiting(self, device: str) -> bool:
        """Return whether a device waits for messages and can run nothing."""
        return bool(self._awaited and self._awaited[device])

    def start(self, device: str) -> Iterator[Message]:
        """Begin with what a device exchanges before its first operation."""
        return self._begin(device, device)

    def end(self, device: str, operation: Operation, sent: Message | None) -> Iterator[Message]:
        """Go on after an operation.

        Args:
            device: that ran it.
            operation: that ended.
            sent: the message that it made.

        Returns:
            The messages that set off.
        """
        if sent is not None and (not self.sends_block or sent not in self.ends):
            yield from self._post(sent)
        yield from self._begin(device, operation)

    def arrive(self, message: Message) -> Iterator[Message]:
        """Let both ends of a message that has arrived go on; return those that set off."""
        for device in self.ends.get(message, ()):
            self._awaited[device].discard(message)
            yield from self._advance(device)

    def _begin(self, device: str, key: Operation | str) -> Iterator[Message]:
        if key in self.after:
            self._left[device].extend(self.after[key])
            yield from self._advance(device)

    def _advance(self, device: str) -> Iterator[Message]:
        left, awaited = self._left[device], self._awaited[device]
        while left and not awaited:
            exchange = left.popleft()
            awaited.update(exchange)
            for message in exchange:
                yield from self._post(message)

    def _post(self, message: Message) -> Iterator[Message]:
        self._posted[message] += 1
        if message not in self.ends or self._posted[message] == self.posts:
            yield message


def exchanges_of(pipeline: PlacedPipeline, owner: Owner, orders: Orders | None) -> Exchanges:
    """Return the exchanges of a replay.

    Args:
        pipeline: whose runtime sets the rules.
        owner: the device of each (stage, microbatch).
        orders: of all devices; None if they are not known in advance. Then receives overlap, and
            a time may be too low.
    """
    behaviour = pipeline.behaviour
    sends_block = behaviour.send == "blocking"
    receives_block = behaviour.receive == "blocking" and orders is not None
    if not (sends_block or receives_block):
        return Exchanges(False, 1, {}, {})
    rows = _Rows(pipeline, owner, sends_block, receives_block)
    after: dict[Operation | str, Sequence[Exchange]] = {}
    if orders is None:
        after |= rows.of_senders()
    else:
        for device, order in orders.items():
            after |= rows.of(device, order)
    return Exchanges(sends_block, 1 + receives_block, rows.ends, after)


class _Rows:
    """The exchanges of a device by its order."""

    def __init__(
        self, pipeline: PlacedPipeline, owner: Owner, sends_block: bool, receives_block: bool
    ) -> None:
        self._behaviour: RuntimeBehaviour = pipeline.behaviour
        self._sends_block, self._receives_block = sends_block, receives_block
        self._last = len(pipeline.stages) - 1
        self.ends: dict[Message, tuple[str, str]] = {}
        for (stage, microbatch), device in owner.items():
            for kind, user in (("F", stage + 1), ("B", stage - 1)):
                target = owner.get((user, microbatch))
                if target is None:
                    continue
                if pipeline.is_message(stage, device, target, forward=kind == "F"):
                    message = Operation(user, "F" if kind == "F" else "B", microbatch)
                    self.ends[message] = device, target

    def of_senders(self) -> dict[Operation | str, Sequence[Exchange]]:
        """Return the exchanges of all devices if each operation is followed by its own send."""
        found: dict[Operation | str, Sequence[Exchange]] = {}
        for message in self.ends if self._sends_block else ():
            stage, kind, microbatch = message
            before = stage - 1 if kind == "F" else stage + 1
            makers: tuple[Kind, ...] = ("F",) if kind == "F" else ("B", "I")
            found |= {Operation(before, maker, microbatch): [[message]] for maker in makers}
        return found

    def _sent_by(self, operation: Operation) -> list[Message]:
        stage, kind, microbatch = operation
        if not self._sends_block or kind == "W":
            return []
        forward = kind == "F"
        user = stage + 1 if forward else stage - 1
        return self._known(Operation(user, "F" if forward else "B", microbatch))

    def _needed_by(self, operation: Operation) -> list[Message]:
        if not self._receives_block or operation.kind == "W":
            return []
        return self._known(operation if operation.kind == "F" else operation._replace(kind="B"))

    def _known(self, message: Message) -> list[Message]:
        return [message] if message in self.ends else []

    def of(
        self, device: str, order: Sequence[Operation]
    ) -> dict[Operation | str, Sequence[Exchange]]:
        """Return what a device exchanges after its operations, and before the first."""
        found: dict[Operation | str, Sequence[Exchange]] = {}
        for before, after in pairwise([[], *self._blocks(order), []]):
            sent = [message for operation in before for message in self._sent_by(operation)]
            needed = [message for operation in after for message in self._needed_by(operation)]
            if sent or needed:
                found[before[-1] if before else device] = self._exchanges(sent, needed)
        return found

    def _blocks(self, order: Sequence[Operation]) -> list[list[Operation]]:
        """Return the operations between which there is no exchange."""
        blocks: list[list[Operation]] = []
        for operation in order:
            last = blocks[-1] if blocks else []
            if len(last) == 1 and self._is_pair(last[0], operation):
                last.append(operation)
            else:
                blocks.append([operation])
        return blocks

    def _is_pair(self, first: Operation, second: Operation) -> bool:
        """Return whether there is no exchange between them; a backward never waits for itself."""
        needs_first = first.microbatch == second.microbatch and first.stage < self._last
        kinds = first.kind == "F" and second.kind in "BI"
        return self._behaviour.exchange == "pairs" and kinds and not needs_first

    def _exchanges(self, sent: list[Message], needed: list[Message]) -> list[Exchange]:
        others = {self.ends[message][1] for message in sent}
        others |= {self.ends[message][0] for message in needed}
        at_once = self._behaviour.exchange in ("together", "pairs") or (
            self._behaviour.exchange == "neighbour" and len(others) == 1
        )
        return [[*sent, *needed]] if at_once else [row for row in (sent, needed) if row]
