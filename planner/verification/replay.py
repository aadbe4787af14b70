"""The replay of docs/cost_model.md: when everything runs, and what is in memory at every moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import groupby, pairwise
from math import inf

from planner.cluster.hardware import Source
from planner.errors import DeadlockError
from planner.plan.operations import Operation, Orders, owners
from planner.plan.plan import Plan
from planner.verification.costs import PlanCosts, Reduction
from planner.verification.routes import Lane


@dataclass(frozen=True)
class Step:
    """What took time, and the step it waited for, which ended when it began.

    Attributes:
        start_s: when it began.
        end_s: when it ended.
        devices: one; or those that a message or a ring of messages visits, in order.
        cause: None of what began the iteration.
        operation: None of messages, all-reduces and optimizer steps.
    """

    start_s: float
    end_s: float
    devices: tuple[str, ...]
    cause: Step | None
    operation: Operation | None = None

    @property
    def seconds(self) -> float:
        """What it took."""
        return self.end_s - self.start_s


class _Host:
    """Devices that slow each other, and a clock that runs slower the more of them compute."""

    def __init__(self, slowdown: Sequence[float]) -> None:
        self._slowdown = slowdown
        self._clock = self._moment = 0.0
        self._rings_at: dict[str, float] = {}

    def begin(self, device: str, seconds: float, now: float) -> None:
        self._tick(now)
        self._rings_at[device] = self._clock + seconds

    def done(self, device: str, now: float) -> None:
        self._tick(now)
        del self._rings_at[device]

    def moments(self) -> Iterator[tuple[str, float]]:
        """Yield when each device that computes will be done, if none begins or ends before."""
        for device, rings_at in self._rings_at.items():
            yield device, self._moment + (rings_at - self._clock) * self._slower()

    def _slower(self) -> float:
        return self._slowdown[len(self._rings_at) - 1] if self._rings_at else 1.0

    def _tick(self, now: float) -> None:
        if now > self._moment:
            self._clock += (now - self._moment) / self._slower()
            self._moment = now


def _hosts(plan: Plan) -> dict[str, _Host]:
    """Return the hosts of devices that share one, by device."""
    found: dict[str, _Host] = {}
    for host in plan.cluster.hosts:
        found.update(dict.fromkeys(host.devices, _Host(host.slowdown)))
    return found


@dataclass(frozen=True)
class Replayed:
    """What a replay gives.

    Attributes:
        last: the optimizer step that ends the iteration.
        operations: in the order of their starts.
        busy_s: by device, its computation and its optimizer step.
        memory: by device, moments and the bytes held from each on.
    """

    last: Step
    operations: Sequence[Step]
    busy_s: dict[str, float]
    memory: dict[str, list[tuple[float, int]]]

    @property
    def iteration_time_s(self) -> float:
        """The time at which the last device has done its optimizer step."""
        return self.last.end_s

    @property
    def bubble(self) -> float:
        """Idle share of the devices in use."""
        whole = len(self.busy_s) * self.iteration_time_s
        return max(0.0, 1 - sum(self.busy_s.values()) / whole) if whole else 0.0

    def peak_bytes(self, device: str) -> int:
        """The most that a device holds at any moment."""
        return max(held for _, held in self.memory[device])


def replay(plan: Plan, orders: Orders, costs: PlanCosts) -> Replayed:
    """Run one iteration.

    Args:
        plan: of a form that holds.
        orders: its orders, parsed.
        costs: of the plan.

    Raises:
        DeadlockError: if devices wait for each other; the message says where.
        PipeplanError: if no path joins two devices that exchange data.
    """
    return _Replay(plan, orders, costs).run()


class _Replay:
    def __init__(self, plan: Plan, orders: Orders, costs: PlanCosts) -> None:
        self._costs = costs
        self._plan = plan
        self._last = len(plan.stages) - 1
        self._orders = orders
        self._runs_on = owners(orders)
        self._next = dict.fromkeys(orders, 0)
        self._ready = {Operation(0, "F", microbatch) for microbatch in range(plan.microbatches)}
        # Moments at which an operation ends, or its input arrives (True).
        self._moments: list[tuple[float, Operation, bool]] = []
        # The last step of each device and link, the message for each operation.
        self._ran: dict[str, Step] = {}
        self._operations: list[Step] = []
        self._carried: dict[Lane, Step] = {}
        self._brought: dict[Operation, Step] = {}
        self._last_backward: dict[tuple[int, str], Step] = {}
        self._busy_s = dict.fromkeys(costs.devices, 0.0)
        self._changes = {d: [(0.0, costs.constant_bytes(d))] for d in costs.devices}
        self._hosts = _hosts(plan)
        self._disturbed: dict[_Host, None] = {}
        # On hosts: when what a device computes will be done, as far as is known.
        self._done_at: dict[str, float] = {}

    def run(self) -> Replayed:
        for device in self._orders:
            self._start_next(device, 0.0)
        self._settle_hosts()
        while self._moments:
            now = self._moments[0][0]
            concerned = set()
            # All that happens at this moment comes before anything starts.
            while self._moments and self._moments[0][0] == now:
                _, operation, arrives = heappop(self._moments)
                device = self._runs_on[operation.stage, operation.microbatch]
                if arrives:
                    self._receive(operation)
                elif self._is_done(device, operation, now):
                    self._end(operation, now)
                else:
                    continue
                concerned.add(device)
            for device in concerned:
                self._start_next(device, now)
            self._settle_hosts()
        waiting = [device for device in self._orders if self._is_left(device)]
        if waiting:
            at = (f"{name} waits at {self._orders[name][self._next[name]]}" for name in waiting)
            raise DeadlockError(f"the orders deadlock: {', '.join(at)}")
        memory = {device: _held(rows) for device, rows in self._changes.items()}
        operations = sorted(self._operations, key=lambda step: step.start_s)
        return Replayed(self._last_step(), operations, self._busy_s, memory)

    def _is_left(self, device: str) -> bool:
        return self._next[device] < len(self._orders[device])

    def _start_next(self, device: str, now: float) -> None:
        before = self._ran.get(device)
        if not self._is_left(device) or (before is not None and before.end_s > now):
            return
        operation = self._orders[device][self._next[device]]
        if operation not in self._ready:
            return
        self._next[device] += 1
        seconds = self._costs.seconds(operation.stage, operation.kind, device)
        cause = _ended_at(now, before, self._brought.get(operation))
        self._ran[device] = Step(now, now + seconds, (device,), cause, operation)
        host = self._hosts.get(device)
        if host is None:
            heappush(self._moments, (now + seconds, operation, False))
            return
        host.begin(device, seconds, now)
        self._done_at[device] = inf
        self._ran[device] = replace(self._ran[device], end_s=inf)
        self._disturbed[host] = None

    def _settle_hosts(self) -> None:
        """What begins or ends on a host moves the ends of all that it computes."""
        for host in self._disturbed:
            for device, moment in host.moments():
                operation = self._ran[device].operation
                if operation is not None and self._done_at[device] != moment:
                    self._done_at[device] = moment
                    heappush(self._moments, (moment, operation, False))
        self._disturbed.clear()

    def _is_done(self, device: str, operation: Operation, now: float) -> bool:
        """On a host an end that was announced may have been put off, or brought forward."""
        host, step = self._hosts.get(device), self._ran[device]
        if host is None:
            return True
        if step.operation != operation or self._done_at.get(device) != now:
            return False
        host.done(device, now)
        del self._done_at[device]
        self._disturbed[host] = None
        self._ran[device] = replace(step, end_s=now)
        return True

    def _receive(self, operation: Operation) -> None:
        """A gradient serves a whole backward or an input gradient, whichever the order has."""
        stage, kind, microbatch = operation
        self._ready.add(operation)
        if kind == "B":
            self._ready.add(Operation(stage, "I", microbatch))

    def _end(self, operation: Operation, now: float) -> None:
        stage, kind, microbatch = operation
        row = self._costs.bytes[stage]
        device = self._runs_on[stage, microbatch]
        self._busy_s[device] += self._ran[device].seconds
        self._hold(device, operation, self._ran[device])
        self._operations.append(self._ran[device])
        if kind == "F" and stage < self._last:
            self._send(operation, Operation(stage + 1, "F", microbatch), row.sent, now)
        elif kind == "F":
            self._receive(Operation(stage, "B", microbatch))
        elif kind in "BI" and stage > 0:
            self._send(operation, Operation(stage - 1, "B", microbatch), row.gradient_sent, now)
        if kind == "I":
            self._ready.add(Operation(stage, "W", microbatch))
        if kind in "BW":
            self._last_backward[stage, device] = self._ran[device]

    def _send(self, operation: Operation, user: Operation, bytes_: int, now: float) -> None:
        """It waits for all links of its path and then holds them all."""
        source = self._runs_on[operation.stage, operation.microbatch]
        target = self._runs_on[user.stage, user.microbatch]
        path = self._costs.message(bytes_, source, target)
        lanes = () if path is None else path.lanes
        rivals = [self._carried[lane] for lane in lanes if lane in self._carried]
        start = max([now, *(rival.end_s for rival in rivals)])
        seconds = 0.0 if path is None else path.seconds(bytes_)
        cause = _ended_at(start, self._ran[source], *rivals)
        message = Step(start, start + seconds, (source, target), cause)
        self._carried.update(dict.fromkeys(lanes, message))
        self._brought[user] = message
        if user.kind == "B":
            self._brought[Operation(user.stage, "I", user.microbatch)] = message
        self._changes[target].append((start, bytes_))
        self._changes[source].append((message.end_s, -bytes_))
        heappush(self._moments, (message.end_s, user, True))

    def _hold(self, device: str, operation: Operation, ran: Step) -> None:
        """What an operation takes and leaves; what it receives was counted as it arrived."""
        stage, kind, _ = operation
        row = self._costs.bytes[stage]
        at_start = at_end = 0
        if kind == "F":
            at_start = row.stash - row.received + row.sent
        elif kind == "B":
            at_start, at_end = row.gradient_sent, -row.stash - row.gradient_received
        elif kind == "I":
            apart = self._costs.split_bytes(stage, device)
            at_start = row.gradient_sent + apart
            at_end = row.weight_stash - row.stash - row.gradient_received - apart
        else:
            at_end = -row.weight_stash
        self._changes[device] += [(ran.start_s, at_start), (ran.end_s, at_end)]

    def _last_step(self) -> Step:
        """Reductions, one a device at a time in the order in which they can begin; then steps."""
        network: dict[str, Step] = {}
        for reduction in sorted(self._costs.reductions, key=self._ready_s):
            others = [network[device] for device in reduction.devices if device in network]
            before = [*self._backwards(reduction), *others]
            ring = (*reduction.devices, reduction.devices[0])
            done = _after(before, reduction.seconds, ring)
            network.update(dict.fromkeys(reduction.devices, done))
        steps = {}
        for device in self._costs.devices:
            before = [row[device] for row in (self._ran, network) if device in row]
            steps[device] = _after(before, self._costs.optimizer_s(device), (device,))
        steps = _on_hosts(steps, self._costs.optimizer_s, _hosts(self._plan))
        for device, step in steps.items():
            self._busy_s[device] += step.seconds
        return max(steps.values(), key=lambda step: step.end_s)

    def _backwards(self, reduction: Reduction) -> list[Step]:
        """The last backwards, each as far as the gradients need it."""
        pairs = [(stage, device) for stage in reduction.stages for device in reduction.devices]
        return [
            self._until_ready(reduction, self._last_backward[pair])
            for pair in pairs
            if pair in self._last_backward
        ]

    def _until_ready(self, reduction: Reduction, backward: Step) -> Step:
        """A backward runs the layers from the last to the first, a bucket waits for some."""
        if reduction.first_layer is None or backward.operation is None:
            return backward
        stage, kind, _ = backward.operation
        device = backward.devices[0]
        left_s = self._costs.before_s(stage, reduction.first_layer, kind, device)
        alone_s = self._costs.seconds(stage, kind, device)
        if device in self._hosts and alone_s:
            # Slowed by others, it makes each gradient later in proportion.
            left_s *= backward.seconds / alone_s
        return replace(backward, end_s=max(backward.start_s, backward.end_s - left_s))

    def _ready_s(self, reduction: Reduction) -> float:
        return max((step.end_s for step in self._backwards(reduction)), default=0.0)


def _on_hosts(
    steps: dict[str, Step], seconds: Callable[[str], float], hosts: dict[str, _Host]
) -> dict[str, Step]:
    """Optimizer steps as long as they take while others of the same host step as well."""
    found, computing = dict(steps), dict[str, float]()
    begins = sorted((step.start_s, device) for device, step in steps.items() if device in hosts)
    while begins or computing:
        moment, device = min(((end, name) for name, end in computing.items()), default=(inf, ""))
        if begins and begins[0][0] < moment:
            moment, device = begins.pop(0)
            hosts[device].begin(device, seconds(device), moment)
        else:
            del computing[device]
            hosts[device].done(device, moment)
            found[device] = replace(steps[device], end_s=moment)
        computing.update(hosts[device].moments())
    return found


def _after(steps: list[Step], seconds: float, devices: tuple[str, ...]) -> Step:
    start = max((step.end_s for step in steps), default=0.0)
    return Step(start, start + seconds, devices, _ended_at(start, *steps))


def _ended_at(now: float, *steps: Step | None) -> Step | None:
    """The first of these that ended now."""
    return next((step for step in steps if step is not None and step.end_s == now), None)


def _held(changes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The bytes from each moment on, all that changes at it counted together."""
    steps, total = [], 0
    for moment, rows in groupby(sorted(changes), key=lambda row: row[0]):
        total += sum(change for _, change in rows)
        steps.append((moment, total))
    return steps


_WEAKEST_FIRST: tuple[Source, ...] = ("assumed", "datasheet", "measured")
_PHASES_OF = {
    "F": ("forward",),
    "I": ("input_gradient",),
    "W": ("weight_gradient",),
    "B": ("input_gradient", "weight_gradient"),
}


def time_shares(plan: Plan, costs: PlanCosts, last: Step) -> dict[str, float] | None:
    """Return the shares of the critical path by what its times come from; None if it takes none.

    Args:
        plan: that was replayed.
        costs: of the plan.
        last: the step that ends the iteration.
    """
    found: dict[str, float] = dict.fromkeys(_WEAKEST_FIRST, 0.0)
    step: Step | None = last
    while step is not None:
        if step.seconds:
            parts = list(_parts(plan, costs, step))
            whole = sum(seconds for _, seconds in parts)
            for source, seconds in parts:
                found[source] += seconds / whole * step.seconds
        step = step.cause
    total = sum(found.values())
    return {name: seconds / total for name, seconds in found.items()} if total else None


def _parts(plan: Plan, costs: PlanCosts, step: Step) -> Iterator[tuple[Source, float]]:
    """The seconds of a step, or a share of them, by their source."""
    if step.operation is not None:
        stage, kind, _ = step.operation
        yield from _operation_parts(plan, costs, stage, kind, step.devices[0])
    elif len(step.devices) == 1:  # An optimizer step.
        yield plan.cluster.device_type(step.devices[0]).source, 1.0
    else:
        yield _weakest_link(plan, costs, step.devices), 1.0


def _weakest_link(plan: Plan, costs: PlanCosts, devices: Sequence[str]) -> Source:
    """Return the weakest source of the links on a message's path or an all-reduce's ring."""
    links = plan.cluster.links
    paths = (costs.routes.path(*ends) for ends in pairwise(devices))
    sources = {links[number].source for path in paths for number in path.links}
    return next(source for source in _WEAKEST_FIRST if source in sources)


def _operation_parts(
    plan: Plan, costs: PlanCosts, stage: int, kind: str, device: str
) -> Iterator[tuple[Source, float]]:
    """Each layer by its time: measured, or phase by phase of its roofline."""
    type_name, rerun = plan.cluster.type_of(device), set(plan.stages[stage].recompute)
    for layer in costs.layers(stage):
        if type_name in layer.measured:
            yield "measured", costs.layer_seconds(layer, type_name)["FIWB".index(kind)]
            continue
        kind_of_device = plan.cluster.device_types[type_name]
        again = _PHASES_OF["F"] if layer.name in rerun and kind in "BI" else ()
        for phase in (*_PHASES_OF[kind], *again):
            seconds, by_throughput = costs.problem.roofline(layer, phase, kind_of_device)
            is_guess = kind_of_device.source == "datasheet" and by_throughput
            yield "assumed" if is_guess else kind_of_device.source, seconds
