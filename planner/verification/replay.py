"""The replay of docs/cost_model.md: when everything runs, and what is in memory at every moment."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import groupby
from math import inf

from planner.errors import DeadlockError
from planner.plan.operations import Operation, Orders, owners
from planner.plan.plan import Plan
from planner.verification.costs import PlanCosts
from planner.verification.gathers import gathering
from planner.verification.gradients import GradientSums
from planner.verification.routes import Path
from planner.verification.script import Entry, Message, Scripts
from planner.verification.speeds import CheckedSpeeds, ends_together
from planner.verification.stashes import StashTravel
from planner.verification.steps import Step, after, ended_at
from planner.verification.traffic import CheckedSending, Traffic


@dataclass(frozen=True)
class Replayed:
    """What a replay gives.

    Attributes:
        last: the optimizer step, or the all-gather behind one, that ends the iteration.
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
        """The time at which the last device has done its optimizer step, and all is gathered."""
        return self.last.end_s

    @property
    def bubble(self) -> float:
        """Idle share of the devices in use."""
        whole = len(self.busy_s) * self.iteration_time_s
        return max(0.0, 1 - sum(self.busy_s.values()) / whole) if whole else 0.0

    def peak_bytes(self, device: str) -> int:
        """The most that a device holds at any moment."""
        return max(held for _, held in self.memory[device])


def replay(
    plan: Plan, orders: Orders, costs: PlanCosts, by_microbatch: Sequence[PlanCosts] = ()
) -> Replayed:
    """Run one iteration.

    Args:
        plan: of a form that holds.
        orders: its orders, parsed.
        costs: of the plan.
        by_microbatch: what gives times and messages of each microbatch, where these differ.

    Raises:
        DeadlockError: if devices wait for each other; the message says where.
        PipeplanError: if no path joins two devices that exchange data.
    """
    return _Replay(plan, orders, costs, by_microbatch).run()


class _Replay:
    def __init__(
        self, plan: Plan, orders: Orders, costs: PlanCosts, by_microbatch: Sequence[PlanCosts]
    ) -> None:
        self._costs, self._by_microbatch = costs, by_microbatch
        self._plan, self._rules = plan, plan.behaviour
        self._last = len(plan.stages) - 1
        self._runs_on = owners(orders)
        self._scripts = Scripts(plan.behaviour, self._last, self._runs_on, self._leaves_device)
        self._left = {name: self._scripts.of(order)[::-1] for name, order in orders.items()}
        # Messages that their senders or receivers have posted, and those that have arrived.
        self._posted: Counter[Message] = Counter()
        self._arrived: set[Message] = set()
        self._entered: set[str] = set()
        self._ready = {Operation(0, "F", microbatch) for microbatch in range(plan.microbatches)}
        # Moments at which an operation ends, or its input arrives (True).
        self._moments: list[tuple[float, Operation, bool]] = []
        # The last step of each device and link, the message for each operation.
        self._ran: dict[str, Step] = {}
        self._operations: list[Step] = []
        self._traffic = Traffic(plan.cluster)
        # Messages on their way with what may have let them set off, and the last in each line.
        self._under_way: dict[CheckedSending, tuple[Message, list[Step | None]]] = {}
        self._carried: dict[Hashable, Step] = {}
        self._made: dict[Message, Step] = {}
        self._brought: dict[Operation, Step] = {}
        # The messages of a device by the moment at which they end, and those it sends.
        self._met: defaultdict[tuple[str, float], list[tuple[float, Message, Step]]]
        self._met = defaultdict(list)
        self._sent: defaultdict[str, list[tuple[float, Message, Step]]] = defaultdict(list)
        self._sums = GradientSums(plan, orders, costs, self._traffic)
        self._busy_s = dict.fromkeys(costs.devices, 0.0)
        self._changes = {d: [(0.0, costs.constant_bytes(d))] for d in costs.devices}
        # By stage, the first two of its backwards and weight gradients, where they make gradients.
        self._backwards: defaultdict[int, list[str]] = defaultdict(list)
        self._stashes = StashTravel(orders, costs)
        self._speeds = CheckedSpeeds(plan)
        # Of devices that may be slowed: when what each computes will be done, as far as is known.
        self._done_at: dict[str, float] = {}

    def run(self) -> Replayed:
        for device in self._costs.devices:
            self._exchange(device, 0.0)
        now, concerned = 0.0, set(self._left)
        while now < inf:
            # All that ends or arrives at a moment does so before anything starts.
            self._sums.make(now, self._ran)
            self._end_devices(concerned, now)
            for device in concerned:
                self._start_next(device, now)
            self._sums.begin(now)
            self._traffic.divide(now, self._speeds.computing)
            self._time_again(now)
            now = self._next_s(now)
            concerned = self._happen(now)
        waiting = [device for device, left in self._left.items() if left]
        if waiting:
            at = (f"{name} waits at {self._next_operation(name)}" for name in waiting)
            raise DeadlockError(f"the orders deadlock: {', '.join(at)}")
        for device, rows in self._stashes.changes.items():
            self._changes[device] += rows
        memory = {device: _held(rows) for device, rows in self._changes.items()}
        operations = sorted(self._operations, key=lambda step: step.start_s)
        return Replayed(self._last_step(), operations, self._busy_s, memory)

    def _next_s(self, now: float) -> float:
        moment = self._moments[0][0] if self._moments else inf
        stash_s = self._stashes.next_s()
        return min(moment, self._traffic.next_s(now), self._sums.next_s(), stash_s)

    def _happen(self, now: float) -> set[str]:
        """Let everything end and arrive that does so now; return the devices that may go on."""
        for sending in self._traffic.arrived(now) if now < inf else ():
            if not self._sums.end(sending, now):
                self._take_in(sending, now)
        concerned = self._stashes.come_back(now)
        while self._moments and self._moments[0][0] == now:
            _, operation, arrives = heappop(self._moments)
            device = self._runs_on[operation.stage, operation.microbatch]
            if arrives:
                concerned.add(self._arrive(operation, now))
            elif self._is_done(device, operation, now):
                self._end(operation, now)
            else:
                continue
            concerned.add(device)
        return concerned

    def _end_devices(self, devices: set[str], now: float) -> None:
        """A device has ended when its script is over, and what it ran last."""
        for device in devices:
            ran = self._ran.get(device)
            if not self._left.get(device) and ran is not None and ran.end_s <= now:
                self._sums.end_device(device, self._at_end(device))

    def _costs_of(self, operation: Operation) -> PlanCosts:
        """What an operation, or a message, of a microbatch takes."""
        return self._by_microbatch[operation.microbatch] if self._by_microbatch else self._costs

    def _next_operation(self, device: str) -> Operation | str:
        entries: Iterator[Entry] = reversed(self._left[device])
        found = (entry for entry in entries if isinstance(entry, Operation))
        return next(found, "the end of its messages")

    def _start_next(self, device: str, now: float) -> None:
        """Start what a device runs next, on all replicas where they put its layers together."""
        operation = self._startable(device, now)
        if operation is None:
            return
        devices = [device]
        if self._costs.collective_s(operation.stage):
            devices += [d for d in self._plan.stages[operation.stage].devices if d != device]
        parts = [self._startable(name, now) for name in devices]
        found = [part for part in parts if part is not None and part[:2] == operation[:2]]
        if len(found) < len(devices):
            return
        causes = {d: self._causes(d, o, now) for d, o in zip(devices, found, strict=True)}
        order = self._plan.stages[operation.stage].devices
        for name, part in zip(devices, found, strict=True):
            others = (causes[other] for other in order if other != name and other in causes)
            self._start(name, part, now, [*causes[name], *(c for row in others for c in row)])

    def _startable(self, device: str, now: float) -> Operation | None:
        """Return what a device runs next if nothing of its own is in the way."""
        before, left = self._ran.get(device), self._left.get(device)
        if not left or (before is not None and before.end_s > now):
            return None
        operation = left[-1]
        if not isinstance(operation, Operation) or operation not in self._ready:
            return None
        return operation if self._stashes.is_there(operation, now) else None

    def _causes(self, device: str, operation: Operation, now: float) -> list[Step | None]:
        """Return what an operation that starts now had to wait for."""
        causes = [self._ran.get(device), self._brought.get(operation)]
        return [*causes, self._stashes.back.get(operation), *self._met_at(now, device)]

    def _start(
        self, device: str, operation: Operation, now: float, causes: list[Step | None]
    ) -> None:
        self._left[device].pop()
        costs = self._costs_of(operation)
        seconds = costs.seconds(operation.stage, operation.kind, device)
        cause = ended_at(now, *causes)
        self._stashes.begin(device, operation, now, causes)
        self._ran[device] = Step(now, now + seconds, (device,), cause, operation)
        if not self._speeds.may_slow(device):
            heappush(self._moments, (now + seconds, operation, False))
            self._sums.begin_backward(
                operation, device, lambda left_s: max(now, now + seconds - left_s), costs
            )
            return
        self._speeds.begin(device, seconds, now)
        self._done_at[device] = inf
        self._ran[device] = replace(self._ran[device], end_s=inf)

    def _time_again(self, now: float) -> None:
        """What begins or ends moves the ends of what it slows."""
        if not self._done_at:
            return
        for device, moment in self._speeds.moments(now, self._traffic.communicating()).items():
            operation = self._ran[device].operation
            if operation is None:
                continue
            self._sums.begin_backward(
                operation,
                device,
                partial(self._not_before, now, device),
                self._costs_of(operation),
            )
            if self._done_at[device] != moment:
                self._done_at[device] = moment
                heappush(self._moments, (moment, operation, False))

    def _not_before(self, now: float, device: str, left_s: float) -> float:
        return max(now, self._speeds.moment(device, left_s))

    def _is_done(self, device: str, operation: Operation, now: float) -> bool:
        """An end that was announced may have been put off, or brought forward."""
        if not self._speeds.may_slow(device):
            return True
        step = self._ran[device]
        if step.operation != operation or self._done_at.get(device) != now:
            return False
        self._speeds.done(device)
        del self._done_at[device]
        self._ran[device] = replace(step, end_s=now)
        return True

    def _receive(self, operation: Operation) -> None:
        """A gradient serves a whole backward or an input gradient, whichever the order has."""
        stage, kind, microbatch = operation
        self._ready.add(operation)
        if kind == "B":
            self._ready.add(Operation(stage, "I", microbatch))

    def _arrive(self, user: Operation, now: float) -> str:
        """Hand on a message; its sender goes on first, and is returned."""
        self._receive(user)
        self._arrived.add(user)
        source = self._scripts.source(user)
        for device in (source, self._runs_on[user.stage, user.microbatch]):
            if device in self._entered:
                self._exchange(device, now)
        return source

    def _exchange(self, device: str, now: float) -> None:
        """Post the messages of an exchange, once, and leave it when all have arrived."""
        left = self._left.get(device, [])
        while left and not isinstance(left[-1], Operation):
            if device not in self._entered:
                self._entered.add(device)
                for message in left[-1]:
                    self._post(message, now)
            if not self._arrived.issuperset(left[-1]):
                return
            self._entered.discard(device)
            left.pop()

    def _post(self, message: Message, now: float) -> None:
        self._posted[message] += 1
        if self._posted[message] == (2 if self._rules.receive == "blocking" else 1):
            self._send(message, now)

    def _leaves_device(self, message: Message) -> bool:
        """Whether it is a message at all: it has bytes, and another device needs it."""
        source = self._scripts.source(message)
        target = self._runs_on[message.stage, message.microbatch]
        return source != target and self._sent_bytes(message) > 0

    def _bytes(self, message: Message) -> tuple[int, int]:
        """What there is room for on the source and on the target."""
        there = self._costs.bytes[message.stage]
        if message.kind == "F":
            return self._costs.bytes[message.stage - 1].sent, there.received
        return self._costs.bytes[message.stage + 1].gradient_sent, there.gradient_received

    def _sent_bytes(self, message: Message) -> int:
        """What is sent, in place of what there is room for."""
        rows = self._costs_of(message).bytes
        if message.kind == "F":
            return rows[message.stage - 1].message
        return rows[message.stage + 1].gradient_message

    def _gathered_bytes(self, message: Message) -> int:
        rows = self._costs_of(message).bytes
        if message.kind == "F":
            return rows[message.stage - 1].gathered
        return rows[message.stage + 1].gradient_gathered

    def _end(self, operation: Operation, now: float) -> None:
        stage, kind, microbatch = operation
        device, message = self._runs_on[stage, microbatch], self._scripts.made_by(operation)
        self._busy_s[device] += self._ran[device].seconds
        self._hold(device, operation, self._ran[device])
        self._gather_gradients(device, operation, self._ran[device])
        self._operations.append(self._ran[device])
        self._stashes.end(self._ran[device])
        if kind == "F" and stage == self._last:
            self._receive(Operation(stage, "B", microbatch))
        if kind == "I":
            self._ready.add(Operation(stage, "W", microbatch))
        if message is not None:
            self._made[message] = self._ran[device]
            if not self._leaves_device(message):
                self._send(message, now)
            elif self._rules.send == "overlapped":
                self._post(message, now)
        self._exchange(device, now)

    def _send(self, user: Message, now: float) -> None:
        """It waits in its lines, then moves, alone in each of them."""
        source, target = self._scripts.source(user), self._runs_on[user.stage, user.microbatch]
        bytes_, ends = self._sent_bytes(user), (source, target)
        path = self._costs.message(bytes_, source, target)
        causes = [self._made[user], *self._blocked_by(now, ends)]
        if path is None:
            self._bring(user, Step(now, now, ends, ended_at(now, *causes)))
            return
        copying = self._rules.message_copy_gb_per_s
        message_s = self._rules.message_us * 1e-6 + (bytes_ / copying / 1e9 if copying else 0.0)
        message_s += self._costs.gather_s(self._gathered_bytes(user), target)
        sending = CheckedSending(
            self._lines(path, ends),
            ends,
            path.seconds(bytes_) + message_s,
            path.latency_s + message_s,
            path.bytes_per_s,
            Counter(path.lanes) if self._plan.runtime.links == "fair" else None,
        )
        self._under_way[sending] = user, causes
        self._traffic.enter(sending, now)

    def _lines(self, path: Path, ends: tuple[str, str]) -> tuple[Hashable, ...]:
        """Return what serves one at a time; of shared links the pair, unless any may move."""
        streams = ends if self._rules.streams == "one" else ()
        if self._plan.runtime.links == "in_turn":
            return (*path.lanes, *streams)
        return (ends, *streams) if path.lanes else streams

    def _take_in(self, sending: CheckedSending, now: float) -> None:
        """Note a message that arrives."""
        user, causes = self._under_way.pop(sending)
        ends = self._scripts.source(user), self._runs_on[user.stage, user.microbatch]
        rivals = [self._carried[line] for line in sending.lines if line in self._carried]
        start = sending.start_s
        message = Step(start, now, ends, ended_at(start, causes[0], *rivals, *causes[1:]))
        row = (start, user, message)
        self._sent[ends[0]].append(row)
        for device in ends:
            self._met[device, now].append(row)
        self._carried.update(dict.fromkeys(sending.lines, message))
        self._bring(user, message)

    def _bring(self, user: Message, message: Step) -> None:
        self._brought[user] = message
        if user.kind == "B":
            self._brought[Operation(user.stage, "I", user.microbatch)] = message
        (sent, received), (source, target) = self._bytes(user), message.devices
        self._changes[target].append((message.start_s, received))
        self._changes[source].append((message.end_s, -sent))
        heappush(self._moments, (message.end_s, user, True))

    def _blocked_by(self, moment: float, devices: tuple[str, ...]) -> list[Step | None]:
        """What devices did before they posted a message, where they wait."""
        if self._rules.send == self._rules.receive == "overlapped":
            return []
        return [*(self._ran.get(device) for device in devices), *self._met_at(moment, *devices)]

    def _met_at(self, moment: float, *devices: str) -> list[Step]:
        """The messages of some devices that end at a moment, where devices wait for any."""
        if self._rules.send == self._rules.receive == "overlapped":
            return []
        rows = {row[:2]: row[2] for device in devices for row in self._met[device, moment]}
        return [rows[key] for key in sorted(rows)]

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

    def _gather_gradients(self, device: str, operation: Operation, ran: Step) -> None:
        """Gradients come with a first B or W, by a second I at the latest."""
        stage, kind, _ = operation
        row, before = self._costs.bytes[stage], self._backwards[stage]
        if kind == "F" or not row.gradients or len(before) > 1 or "B" in before:
            return
        before.append(kind)
        if kind == "I" and len(before) == 1:
            return
        here = self._costs.stages_on[device]
        room = max(self._costs.bytes[other].workspace for other in here)
        is_first = before in (["B"], ["I", "W"])
        most = row.first_backward if kind == "B" else row.first_weights
        more = max(0, most - room) if is_first else row.gradients
        self._changes[device] += [(ran.start_s, more), (ran.end_s, row.gradients - more)]

    def _last_step(self) -> Step:
        """What ends last: optimizer steps follow all that their devices do, all-gathers these."""
        steps, seconds = {}, {d: self._costs.optimizer_s(d) for d in self._costs.devices}
        for device in self._costs.devices:
            before = [*self._at_end(device), *self._reduced(device)]
            steps[device] = after(before, seconds[device], (device,))
        begins_s = {device: step.start_s for device, step in steps.items()}
        for device, end_s in ends_together(self._plan, begins_s, seconds).items():
            steps[device] = replace(steps[device], end_s=end_s)
        for device, step in steps.items():
            self._busy_s[device] += step.seconds
        gathers = gathering(self._plan, self._costs, steps) if self._costs.shares_state else []
        return max((*steps.values(), *gathers), key=lambda step: step.end_s)

    def _at_end(self, device: str) -> list[Step]:
        """The last operation of a device, and its last sends where it waits for them."""
        sent = self._sent[device] if self._rules.send == "blocking" else []
        last_s = max((step.end_s for _, _, step in sent), default=0.0)
        last = sorted((row for row in sent if row[2].end_s == last_s), key=lambda row: row[:2])
        ran = [self._ran[device]] if device in self._ran else []
        return [*ran, *(step for _, _, step in last)]

    def _reduced(self, device: str) -> list[Step]:
        return [self._sums.last[device]] if device in self._sums.last else []


def _held(changes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The bytes from each moment on, all that changes at it counted together."""
    steps, total = [], 0
    for moment, rows in groupby(sorted(changes), key=lambda row: row[0]):
        total += sum(change for _, change in rows)
        steps.append((moment, total))
    return steps
