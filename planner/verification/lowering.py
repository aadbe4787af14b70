"""What a plan has its devices do, as tasks that wait for each other (docs/replay.md).

This is the checker's own lowering of a plan: plain objects, made from the plan and its costs alone.
When each task started is not found here; :mod:`planner.verification.times` checks that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf

from planner.errors import DeadlockError
from planner.plan.operations import Operation, Orders, owners
from planner.plan.plan import Plan
from planner.verification.costs import PlanCosts
from planner.verification.reductions import Reduction
from planner.verification.routes import AllReduce
from planner.verification.script import Message, Scripts
from planner.verification.tasks import Key, Task, Wait, in_circles, operation_key


class PlanTasks:
    """The tasks of one iteration of a plan.

    Args:
        plan: of a form that holds.
        orders: its orders, parsed.
        costs: of the plan.
        by_microbatch: what gives times and messages of each microbatch, where these differ.

    Attributes:
        tasks: by name.
        on_device: messages that need not be sent, by the operation that makes them.

    Raises:
        DeadlockError: if tasks wait for each other; the message says at what devices wait.
        PipeplanError: if no path joins two devices that exchange data.
    """

    def __init__(
        self, plan: Plan, orders: Orders, costs: PlanCosts, by_microbatch: Sequence[PlanCosts] = ()
    ) -> None:
        self.plan, self.orders, self.costs = plan, orders, costs
        self._by_microbatch = by_microbatch
        self._rules = plan.behaviour
        self._owner = owners(orders)
        self._inputs = {row for order in orders.values() for row in order if row.kind == "I"}
        # The backwards that need their stash back, each with the operation before it: a stash stays
        # where the backward directly follows the forward.
        self._before = {
            row: before
            for order in orders.values()
            for before, row in pairwise(order)
            if row.kind == "B"
            and costs.bytes[row.stage].offloaded
            and before != row._replace(kind="F")
        }
        last = len(plan.stages) - 1
        self._scripts = Scripts(plan.behaviour, last, self._owner, self._leaves_device)
        self.tasks: dict[Key, Task] = {}
        self.on_device: dict[Operation, Message] = {}
        self._sent: defaultdict[str, list[Wait]] = defaultdict(list)
        for task in self._all():
            self.tasks[task.key] = task
        self._start_together()
        self._require_no_circle()

    def _all(self) -> Iterator[Task]:
        posts: defaultdict[Message, list[Wait]] = defaultdict(list)
        for device, order in self.orders.items():
            yield from self._run(device, order, posts)
        yield from self._copies()
        for order in self.orders.values():
            for operation in order:
                yield from self._message(operation, posts)
        yield from self._reductions()
        yield from self._steps()
        yield from self._gathers()

    # --- computation ------------------------------------------------------------------------------

    def costs_of(self, operation: Operation) -> PlanCosts:
        """Return the costs of an operation, or of a message, of a microbatch."""
        return self._by_microbatch[operation.microbatch] if self._by_microbatch else self.costs

    def _run(
        self, device: str, order: Sequence[Operation], posts: dict[Message, list[Wait]]
    ) -> Iterator[Task]:
        """One operation at a time, and exchanges between two of them, one after the other.

        Args:
            device: that runs.
            order: what it runs.
            posts: takes what devices have behind them when they post messages in an exchange.
        """
        before: list[Wait] = []
        exchanged: list[Wait] = []
        for entry in self._scripts.of(order):
            if isinstance(entry, Operation):
                yield self._operation(device, entry, before, exchanged)
                before, exchanged = [Wait(operation_key(entry))], []
                continue
            for message in entry:
                posts[message] += [*before, *exchanged]
            exchanged = [*exchanged, *(Wait(Key("message", message)) for message in entry)]

    def _operation(
        self, device: str, operation: Operation, before: list[Wait], exchanged: list[Wait]
    ) -> Task:
        """Wait for the operation before and the input, a stash from the host, and exchanges."""
        seconds = self.costs_of(operation).seconds(operation.stage, operation.kind, device)
        waits = [*before, *self._input(operation)]
        if operation in self._before:
            waits.append(Wait(Key("copy", operation)))
        return Task(operation_key(operation), (device,), seconds, [*waits, *exchanged])

    def _input(self, operation: Operation) -> list[Wait]:
        """Return what makes or brings the input of an operation."""
        if operation.kind == "W":
            return [Wait(operation_key(operation._replace(kind="I")))]
        message = self._scripts.needed_by(operation)
        if message is None:
            is_first = operation.kind == "F"
            return [] if is_first else [Wait(operation_key(operation._replace(kind="F")))]
        if self._leaves_device(message):
            return [Wait(Key("message", message))]
        return [Wait(operation_key(self._maker(message)))]

    def _maker(self, message: Message) -> Operation:
        """Return the operation that makes a message."""
        stage, kind, microbatch = message
        if kind == "F":
            return Operation(stage - 1, "F", microbatch)
        inputs = Operation(stage + 1, "I", microbatch)
        return inputs if inputs in self._inputs else Operation(stage + 1, "B", microbatch)

    def _copies(self) -> Iterator[Task]:
        """Stashes go to the host after their forward and come back during another operation."""
        for backward, before in self._before.items():
            device = self._owner[backward.stage, backward.microbatch]
            forward = backward._replace(kind="F")
            seconds, line = self.costs.copy_s(backward.stage, device), ((device, "host"),)
            out, asked = Wait(operation_key(forward)), Wait(operation_key(before), inf)
            yield Task(Key("copy", forward), (device,), seconds, [out], line, (0,))
            yield Task(Key("copy", backward), (device,), seconds, [asked], line, (1,))

    def _start_together(self) -> None:
        """The n-th forwards, and the n-th backwards, of replicas that put their layers together."""
        for stage in self.plan.stages:
            if not self.costs.collective_s[stage.index]:
                continue
            numbered: defaultdict[tuple[str, int], list[Task]] = defaultdict(list)
            for device in stage.devices:
                for kind in "FBIW":
                    order = self.orders.get(device, ())
                    mine = (row for row in order if row[:2] == (stage.index, kind))
                    for number, row in enumerate(mine):
                        numbered[kind, number].append(self.tasks[operation_key(row)])
            for tasks in numbered.values():
                if len(tasks) < len(stage.devices):
                    rows = (f"{task.devices[0]} waits at {task.key.of}" for task in tasks)
                    raise DeadlockError(f"the orders deadlock: {', '.join(rows)}")
                for task in tasks:
                    task.together = tuple(row.key for row in tasks if row is not task)

    def waits(self, task: Task) -> Iterator[Wait]:
        """Yield all that a task waits for, its own waits first."""
        yield from task.waits
        for key in task.together:
            yield from self.tasks[key].waits

    # --- messages ---------------------------------------------------------------------------------

    def _message(self, maker: Operation, posts: Mapping[Message, list[Wait]]) -> Iterator[Task]:
        """Yield the message that an operation makes, unless it stays on the device."""
        message = self._scripts.made_by(maker)
        if message is None:
            return
        if not self._leaves_device(message):
            self.on_device[maker] = message
            return
        source, target = ends = self.ends(message)
        path = self.costs.routes.path(source, target)
        bytes_, gathered = self._sent_bytes(message)
        rate = self._rules.message_copy_gb_per_s
        host_s = self._rules.message_us * 1e-6 + (bytes_ / (rate * 1e9) if rate else 0.0)
        host_s += self.costs.gather_s(gathered, target)
        streams = ends if self._rules.streams == "one" else ()
        pair: tuple[Hashable, ...] = (ends,) if path.lanes else ()
        task = Task(
            Key("message", message),
            ends,
            path.seconds(bytes_) + host_s,
            [Wait(operation_key(maker)), *posts.get(message, ())],
            (*pair, *streams),
            maker if self._rules.send == self._rules.receive == "overlapped" else (),
            latency_s=path.latency_s + host_s,
            bytes_per_s=path.bytes_per_s,
            crossings=dict.fromkeys(path.lanes, 1),
        )
        self._sent[source].append(Wait(task.key))
        yield task

    def ends(self, message: Message) -> tuple[str, str]:
        """Return the source and the target of a message."""
        return self._scripts.source(message), self._owner[message.stage, message.microbatch]

    def _leaves_device(self, message: Message) -> bool:
        """Whether it is a message at all: it has bytes, and another device needs it."""
        source, target = self.ends(message)
        return source != target and self._sent_bytes(message)[0] > 0

    def _sent_bytes(self, message: Message) -> tuple[int, int]:
        """Return the bytes of a message, and those of it that arrive in parts."""
        rows = self.costs_of(message).bytes
        if message.kind == "F":
            row = rows[message.stage - 1]
            return row.message, row.gathered
        row = rows[message.stage + 1]
        return row.gradient_message, row.gradient_gathered

    # --- reductions and the optimizer's step ------------------------------------------------------

    def _end_of(self, device: str) -> list[Wait]:
        """Return the last operation of a device, and its sends where it waits for them."""
        order = self.orders.get(device)
        ran = [Wait(operation_key(order[-1]))] if order else []
        return [*ran, *(self._sent[device] if self._rules.send == "blocking" else ())]

    def _reductions(self) -> Iterator[Task]:
        """Gradients are summed once they are there: one reduction a device at a time."""
        last_of = {
            (row.stage, device): row
            for device, order in self.orders.items()
            for row in order
            if row.kind in "BW"
        }
        for number, reduction in enumerate(self.costs.reductions):
            if self._rules.reduction in ("bucket", "stage"):
                pairs = ((s, d) for s in reduction.stages for d in reduction.devices)
                lasts = ((d, last_of[s, d]) for s, d in pairs if (s, d) in last_of)
                waits = [self._made(reduction, device, row) for device, row in lasts]
            else:
                everyone = self._rules.reduction == "flush"
                devices = self.costs.devices if everyone else reduction.devices
                waits = [wait for device in devices for wait in self._end_of(device)]
            taken, devices = reduction.taken, reduction.devices
            yield self._collective(Key("reduction", number), devices, taken, waits)

    def _made(self, reduction: Reduction, device: str, backward: Operation) -> Wait:
        """Return the moment within a last backward at which it has made the gradients."""
        if reduction.first_layer is None:
            return Wait(operation_key(backward))
        stage, kind, _ = backward
        costs = self.costs_of(backward)
        ahead_s = costs.before_s(stage, reduction.first_layer, kind, device)
        return Wait(operation_key(backward), ahead_s)

    def _collective(
        self, key: Key, devices: tuple[str, ...], taken: AllReduce, waits: list[Wait]
    ) -> Task:
        return Task(
            key,
            devices,
            taken.seconds,
            waits,
            tuple((device, key.what) for device in devices),
            (key.of,),
            taken.latency_s,
            taken.bytes_per_s,
            taken.crossings,
        )

    def _steps(self) -> Iterator[Task]:
        """The optimizer step of a device follows all that it does and all its reductions."""
        reduced: defaultdict[str, list[Wait]] = defaultdict(list)
        for number, reduction in enumerate(self.costs.reductions):
            for device in reduction.devices:
                reduced[device].insert(0, Wait(Key("reduction", number)))
        for device in self.costs.devices:
            waits = [*self._end_of(device), *reduced[device]]
            yield Task(Key("step", device), (device,), self.costs.optimizer_s(device), waits)

    def _gathers(self) -> Iterator[Task]:
        """Parameters are gathered after the steps of devices that share the optimizer's state."""
        for number, reduction in enumerate(self.costs.reductions):
            if reduction.gathered is not None:
                devices = reduction.devices
                waits = [Wait(Key("step", device)) for device in devices]
                yield self._collective(Key("gather", number), devices, reduction.gathered, waits)

    # --- circles ----------------------------------------------------------------------------------

    def _require_no_circle(self) -> None:
        """Refuse orders whose operations wait for each other, saying at what each device waits."""
        waits = {key: [w.key for w in self.waits(task)] for key, task in self.tasks.items()}
        stuck = in_circles(waits)
        if not stuck:
            return
        firsts = {
            device: next((row for row in order if operation_key(row) in stuck), None)
            for device, order in self.orders.items()
        }
        rows = [f"{device} waits at {row}" for device, row in firsts.items() if row is not None]
        rows = rows or [str(key) for key in sorted(stuck)[:4]]
        raise DeadlockError(f"the orders deadlock: {', '.join(rows)}")
