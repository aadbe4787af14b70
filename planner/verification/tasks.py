"""What a plan has its devices do, as tasks that wait for each other (docs/replay.md).

This is the checker's own lowering of a plan: plain objects, made from the plan and its costs alone.
When each task started is not found here; :mod:`planner.verification.times` checks that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import dropwhile, pairwise
from math import inf
from typing import Any, Literal, NamedTuple, TypeVar

from planner.errors import DeadlockError
from planner.plan.operations import Operation, Orders, owners
from planner.plan.plan import Plan
from planner.verification.costs import PlanCosts
from planner.verification.reductions import Reduction, reductions_of
from planner.verification.routes import AllReduce, Lane

Node = TypeVar("Node", bound=Hashable)
Message = Operation
"""A message is named after the operation that needs it; a gradient after the whole backward."""


class Key(NamedTuple):
    """Names a task.

    Attributes:
        what: it is. A copy is one of an offloaded stash, a gather one of parameters after the
            optimizer's step.
        of: the operation; of a message, the operation that needs it, of a gradient the whole
            backward; of a copy, the forward or the backward of the stash; the number of a reduction
            or of the reduction that a gather belongs to; the device of an optimizer step.
    """

    what: Literal["operation", "message", "reduction", "gather", "copy", "step"]
    of: Operation | int | str

    def __str__(self) -> str:
        return f"{self.what} {self.of}"


class Wait(NamedTuple):
    """Something that has to have happened before a task starts.

    Attributes:
        key: of another task.
        ahead_s: the seconds, alone, that may be left of it; only its start counts if infinite.
    """

    key: Key
    ahead_s: float = 0.0


@dataclass(slots=True)
class Task:
    """Something that takes time.

    Attributes:
        key: its name.
        devices: that compute it, or that send and receive it; a ring of devices in order.
        seconds: that it takes alone.
        waits: for what it waits.
        lines: each serves one task at a time, in the order in which they have all they wait for.
        rank: which of two goes first in a line if both come at the same moment; empty if either.
        latency_s: of its seconds, those before its first byte moves; infinite of what moves none.
        bytes_per_s: at which it moves bytes alone.
        crossings: the links that it shares with others, and how often it crosses each.
    """

    key: Key
    devices: tuple[str, ...]
    seconds: float
    waits: list[Wait] = field(default_factory=list)
    lines: tuple[Hashable, ...] = ()
    rank: tuple[Any, ...] = ()
    latency_s: float = inf
    bytes_per_s: float = inf
    crossings: Mapping[Lane, int] = field(default_factory=dict)


class PlanTasks:
    """The tasks of one iteration of a plan.

    Args:
        plan: of a form that holds.
        orders: its orders, parsed.
        costs: of the plan.
        by_microbatch: what gives times and messages of each microbatch, where these differ.

    Attributes:
        tasks: by name.
        kept: messages that need not be sent, by the operation that makes them.

    Raises:
        DeadlockError: if tasks wait for each other; the message says at what devices wait.
        PipeplanError: if no path joins two devices that exchange data.
    """

    def __init__(
        self, plan: Plan, orders: Orders, costs: PlanCosts, by_microbatch: Sequence[PlanCosts] = ()
    ) -> None:
        self.plan, self.orders, self.costs = plan, orders, costs
        self._by_microbatch, self._rules = by_microbatch, plan.behaviour
        self._owner, self._last = owners(orders), len(plan.stages) - 1
        self._leaves_device = cache(self._is_sent)
        self._split = {row[::2] for order in orders.values() for row in order if row.kind == "I"}
        self._posts: defaultdict[Message, list[Wait]] = defaultdict(list)
        self._sent: defaultdict[str, list[Wait]] = defaultdict(list)
        self.tasks: dict[Key, Task] = {}
        self.kept: dict[Operation, Message] = {}
        for device, order in orders.items():
            self._add(self._computation(device, order))
            self._add(self._copies(device, order))
        for order in orders.values():
            self._add(self._messages(order))
        reductions = reductions_of(costs)
        self._add(self._reductions(reductions))
        self._add(self._steps(reductions))
        self._start_together()
        self._require_no_circle()

    def _add(self, tasks: Iterable[Task]) -> None:
        self.tasks |= {task.key: task for task in tasks}

    def _costs_of(self, operation: Operation) -> PlanCosts:
        """Return the costs of an operation, or of a message, of a microbatch."""
        return self._by_microbatch[operation.microbatch] if self._by_microbatch else self.costs

    # --- computation ------------------------------------------------------------------------------

    def _computation(self, device: str, order: Sequence[Operation]) -> Iterator[Task]:
        """One operation at a time, and exchanges between two of them, one after the other."""
        free: list[Wait] = []
        sent: list[Message] = []
        for together in self._at_once(order):
            needed = self._blocking(self._rules.receive, map(self._needed_by, together))
            free = self._exchange(sent, needed, free)
            for operation in together:
                seconds = self._costs_of(operation).seconds(*operation[:2], device)
                waits = [*free, *self._input(operation)]
                yield Task(Key("operation", operation), (device,), seconds, waits)
                free = [_ended(operation)]
            sent = self._blocking(self._rules.send, map(self._made_by, together))
        self._exchange(sent, [], free)

    def _at_once(self, order: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
        """Yield operations between which no exchange lies: single ones, or pairs of both ways.

        A device that runs no forward behind a backward has no pairs.
        """
        behind = dropwhile(lambda row: row.kind == "F", order)
        may_pair = self._rules.exchange == "pairs" and any(row.kind == "F" for row in behind)
        number = 0
        while number < len(order):
            pair = order[number : number + 2]
            kinds = "".join(row.kind for row in pair)
            is_pair = may_pair and kinds in ("FB", "FI")
            if is_pair and pair[0].microbatch == pair[1].microbatch:
                is_pair = pair[0].stage == self._last
            yield pair if is_pair else pair[:1]
            number += 2 if is_pair else 1

    def _blocking(self, rule: str, messages: Iterable[Message | None]) -> list[Message]:
        """Return the messages that a device waits for between operations."""
        if rule != "blocking":
            return []
        return [row for row in messages if row and self._leaves_device(row)]

    def _exchange(self, sent: list[Message], needed: list[Message], free: list[Wait]) -> list[Wait]:
        """Have a device post messages after what it waits for; return what it waits for then."""
        if not sent and not needed:
            return free
        rule = self._rules.exchange
        partners = {self.ends(row)[1] for row in sent} | {self.ends(row)[0] for row in needed}
        in_one = rule in ("together", "pairs") or (rule == "neighbour" and len(partners) == 1)
        for messages in [[*sent, *needed]] if in_one else [sent, needed]:
            for message in messages:
                self._posts[message] += free
            free = [*free, *(Wait(Key("message", message)) for message in messages)]
        return free

    def _input(self, operation: Operation) -> Iterator[Wait]:
        """Yield what makes or brings the input of an operation."""
        message = self._needed_by(operation)
        if operation.kind == "W":
            yield _ended(operation._replace(kind="I"))
        elif message is None:
            if operation.kind != "F":
                yield _ended(operation._replace(kind="F"))
        elif self._leaves_device(message):
            yield Wait(Key("message", message))
        else:
            yield _ended(self._maker(message))

    def _copies(self, device: str, order: Sequence[Operation]) -> Iterator[Task]:
        """Stashes go to the host after their forward and come back during another operation.

        A stash stays where the backward directly follows the forward, and where it is split.
        """
        for before, backward in pairwise(order):
            stage, forward = backward.stage, backward._replace(kind="F")
            if backward.kind != "B" or before == forward or not self.costs.bytes[stage].offloaded:
                continue
            seconds, line = self.costs.copy_s(stage, device), ((device, "host"),)
            asked = [Wait(Key("operation", before), inf)]
            out, back = Key("copy", forward), Key("copy", backward)
            yield Task(out, (device,), seconds, [_ended(forward)], line, (0,))
            yield Task(back, (device,), seconds, asked, line, (1,))
            self.tasks[Key("operation", backward)].waits.append(Wait(back))

    def _start_together(self) -> None:
        """The n-th forwards, and the n-th backwards, of replicas that put their layers together."""
        numbered: defaultdict[tuple[int, str, int], list[Task]] = defaultdict(list)
        joint = [stage for stage in self.plan.stages if self.costs.collective_s[stage.index]]
        for stage in joint:
            for device in stage.devices:
                seen: defaultdict[str, int] = defaultdict(int)
                for row in self.orders.get(device, ()):
                    if row.stage == stage.index:
                        task = self.tasks[Key("operation", row)]
                        numbered[stage.index, row.kind, seen[row.kind]].append(task)
                        seen[row.kind] += 1
        for (index, _, _), tasks in numbered.items():
            if len(tasks) < len(self.plan.stages[index].devices):
                raise _deadlock(f"{task.devices[0]} waits at {task.key.of}" for task in tasks)
            waits = [wait for task in tasks for wait in task.waits]
            for task in tasks:
                task.waits = waits

    # --- messages ---------------------------------------------------------------------------------

    def _made_by(self, operation: Operation) -> Message | None:
        """Return the message that an operation makes, even if it stays on the device."""
        stage, kind, microbatch = operation
        if kind == "F" and stage < self._last:
            return Operation(stage + 1, "F", microbatch)
        if kind in "BI" and stage > 0:
            return Operation(stage - 1, "B", microbatch)
        return None

    def _needed_by(self, operation: Operation) -> Message | None:
        """Return the message that an operation needs, even if it stays on the device."""
        stage, kind, _ = operation
        if kind == "F":
            return operation if stage > 0 else None
        return operation._replace(kind="B") if kind != "W" and stage < self._last else None

    def _maker(self, message: Message) -> Operation:
        """Return the operation that makes a message."""
        stage, kind, microbatch = message
        if kind == "F":
            return Operation(stage - 1, "F", microbatch)
        is_split = (stage + 1, microbatch) in self._split
        return Operation(stage + 1, "I" if is_split else "B", microbatch)

    def ends(self, message: Message) -> tuple[str, str]:
        """Return the source and the target of a message."""
        stage, kind, microbatch = message
        source = stage - 1 if kind == "F" else stage + 1
        return self._owner[source, microbatch], self._owner[stage, microbatch]

    def _is_sent(self, message: Message) -> bool:
        """Whether it is a message at all: it has bytes, and another device needs it."""
        source, target = self.ends(message)
        return source != target and self._sent_bytes(message)[0] > 0

    def _sent_bytes(self, message: Message) -> tuple[int, int]:
        """Return the bytes of a message, and those of it that arrive in parts."""
        rows = self._costs_of(message).bytes
        if message.kind == "F":
            row = rows[message.stage - 1]
            return row.message, row.gathered
        row = rows[message.stage + 1]
        return row.gradient_message, row.gradient_gathered

    def _messages(self, order: Sequence[Operation]) -> Iterator[Task]:
        """Yield the messages that operations make, except for what stays on the device."""
        rules = self._rules
        for maker in order:
            message = self._made_by(maker)
            if message is None:
                continue
            if not self._leaves_device(message):
                self.kept[maker] = message
                continue
            ends = self.ends(message)
            path, (bytes_, gathered) = self.costs.routes.path(*ends), self._sent_bytes(message)
            copied_gb = 1 / rules.message_copy_gb_per_s if rules.message_copy_gb_per_s else 0.0
            host_s = rules.message_us * 1e-6 + bytes_ * copied_gb * 1e-9
            host_s += self.costs.gather_s(gathered, ends[1])
            task = Task(
                Key("message", message),
                ends,
                path.seconds(bytes_) + host_s,
                [_ended(maker), *self._posts[message]],
                (*((ends,) if path.lanes else ()), *(ends if rules.streams == "one" else ())),
                maker if rules.send == rules.receive == "overlapped" else (),
                path.latency_s + host_s,
                path.bytes_per_s,
                dict.fromkeys(path.lanes, 1),
            )
            self._sent[ends[0]].append(Wait(task.key))
            yield task

    # --- reductions and the optimizer's step ------------------------------------------------------

    def _end_of(self, device: str) -> list[Wait]:
        """Return the last operation of a device, and its sends where it waits for them."""
        order = self.orders.get(device)
        ran = [_ended(order[-1])] if order else []
        return [*ran, *(self._sent[device] if self._rules.send == "blocking" else ())]

    def _reductions(self, reductions: Sequence[Reduction]) -> Iterator[Task]:
        """Gradients are summed once they are there: one reduction a device at a time.

        Where devices share the optimizer's state, they gather parameters after their steps.
        """
        last_of = {
            (row.stage, device): row
            for device, order in self.orders.items()
            for row in order
            if row.kind in "BW"
        }
        for number, reduction in enumerate(reductions):
            devices = reduction.devices
            if self._rules.reduction in ("bucket", "stage"):
                held = ((stage, device) for stage in reduction.stages for device in devices)
                rows = [(key[1], last_of[key]) for key in held if key in last_of]
                waits = [self._made(reduction, device, row) for device, row in rows]
            else:
                all_of = self.costs.devices if self._rules.reduction == "flush" else devices
                waits = [wait for device in all_of for wait in self._end_of(device)]
            yield _collective(Key("reduction", number), devices, reduction.taken, waits)
            if reduction.gathered is not None:
                steps = [Wait(Key("step", device)) for device in devices]
                yield _collective(Key("gather", number), devices, reduction.gathered, steps)

    def _made(self, reduction: Reduction, device: str, backward: Operation) -> Wait:
        """Return the moment within a last backward at which it has made the gradients."""
        if reduction.first_layer is None:
            return _ended(backward)
        stage, kind, _ = backward
        before_s = self._costs_of(backward).before_s(stage, reduction.first_layer, kind, device)
        return Wait(Key("operation", backward), before_s)

    def _steps(self, reductions: Sequence[Reduction]) -> Iterator[Task]:
        """The optimizer step of a device follows all that it does and all its reductions."""
        reduced: defaultdict[str, list[Wait]] = defaultdict(list)
        for number, reduction in enumerate(reductions):
            for device in reduction.devices:
                reduced[device].append(Wait(Key("reduction", number)))
        for device in self.costs.devices:
            waits = [*self._end_of(device), *reduced[device]]
            yield Task(Key("step", device), (device,), self.costs.optimizer_s(device), waits)

    # --- circles ----------------------------------------------------------------------------------

    def _require_no_circle(self) -> None:
        """Refuse orders whose operations wait for each other, saying at what each device waits."""
        stuck = in_circles({key: [w.key for w in task.waits] for key, task in self.tasks.items()})
        if stuck:
            heads = (
                (device, next((row for row in order if Key("operation", row) in stuck), None))
                for device, order in self.orders.items()
            )
            raise _deadlock(f"{device} waits at {row}" for device, row in heads if row is not None)


def in_circles(waits: Mapping[Node, Collection[Node]]) -> set[Node]:
    """Return what waits in circles, and all that waits for these, for ever; all have an entry."""
    left = {node: len(found) for node, found in waits.items()}
    waiting: defaultdict[Node, list[Node]] = defaultdict(list)
    for node, found in waits.items():
        for other in found:
            waiting[other].append(node)
    free = [node for node, count in left.items() if not count]
    for node in free:
        for other in waiting[node]:
            left[other] -= 1
            if not left[other]:
                free.append(other)
    return left.keys() - set(free)


def _ended(operation: Operation) -> Wait:
    return Wait(Key("operation", operation))


def _collective(key: Key, devices: tuple[str, ...], taken: AllReduce, waits: list[Wait]) -> Task:
    lines = tuple((device, key.what) for device in devices)
    return Task(key, devices, taken.seconds, waits, lines, (key.of,), *taken[1:])


def _deadlock(rows: Iterable[str]) -> DeadlockError:
    return DeadlockError(f"the orders deadlock: {', '.join(rows)}")
