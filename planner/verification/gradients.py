"""When gradients are ready and reduced, by the rules of docs/cost_model.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from planner.plan.operations import Operation, Orders
from planner.plan.plan import Plan
from planner.verification.costs import PlanCosts
from planner.verification.reductions import Reduction
from planner.verification.steps import Step, ended_at
from planner.verification.traffic import CheckedSending, Traffic


def sending_of(reduction: Reduction, *, is_fair: bool) -> CheckedSending:
    """Return a reduction, or its all-gather, as something that is sent among its devices."""
    taken = reduction.taken
    return CheckedSending(
        tuple((device,) for device in reduction.devices),
        reduction.devices,
        taken.seconds,
        taken.latency_s,
        taken.bytes_per_s,
        taken.crossings if is_fair else None,
    )


Part = tuple[int, int, str]
"""What a reduction, by its number, needs of a stage on a device."""


class GradientSums:
    """The reductions of an iteration.

    Args:
        plan: that runs.
        orders: its orders, parsed.
        costs: of the plan.
        traffic: that carries them.

    Attributes:
        last: by device, the last reduction that has ended there.
    """

    def __init__(self, plan: Plan, orders: Orders, costs: PlanCosts, traffic: Traffic) -> None:
        self._costs, self._traffic = costs, traffic
        self._rule, self._is_fair = plan.behaviour.reduction, plan.runtime.links == "fair"
        self._ends_backwards = {
            (operation.stage, device): operation
            for device, order in orders.items()
            for operation in order
            if operation.kind in "BW"
        }
        self._works = [device for device in costs.devices if orders.get(device)]
        self._awaited = [set(self._needed(reduction)) for reduction in costs.reductions]
        self._ready = [number for number, awaited in enumerate(self._awaited) if not awaited]
        self._made_at: dict[Part, float] = {}
        self._found: dict[tuple[int, object], list[Step]] = {}
        self._under_way: dict[CheckedSending, int] = {}
        self.last: dict[str, Step] = {}

    def _needed(self, reduction: Reduction) -> list[object]:
        """Last backwards, by stage and device, or devices that end: in the order of causes."""
        if self._rule in ("bucket", "stage"):
            pairs = [(stage, device) for stage in reduction.stages for device in reduction.devices]
            return [pair for pair in pairs if pair in self._ends_backwards]
        devices = self._costs.devices if self._rule == "flush" else reduction.devices
        return [device for device in devices if device in self._works]

    def begin_backward(
        self,
        operation: Operation,
        device: str,
        moment: Callable[[float], float],
        costs: PlanCosts,
    ) -> None:
        """Note when an operation makes gradients, if it is a stage's last backward on a device.

        Args:
            operation: that runs.
            device: on which it runs.
            moment: when it has all but so many of its seconds behind it, as far as is known.
            costs: of its microbatch.
        """
        stage, kind, _ = operation
        if self._ends_backwards.get((stage, device)) != operation:
            return
        for number, awaited in enumerate(self._awaited):
            if (stage, device) in awaited:
                layer = self._costs.reductions[number].first_layer
                left_s = 0.0 if layer is None else costs.before_s(stage, layer, kind, device)
                self._made_at[number, stage, device] = moment(left_s)

    def next_s(self) -> float:
        """Return the next moment at which gradients are made."""
        return min(self._made_at.values(), default=inf)

    def make(self, now: float, ran: Mapping[str, Step]) -> None:
        """Take the gradients that are made at a moment, by what devices run."""
        for part in [part for part, moment in self._made_at.items() if moment == now]:
            del self._made_at[part]
            number, stage, device = part
            self._note(number, (stage, device), [replace(ran[device], end_s=now)])

    def end_device(self, device: str, steps: list[Step]) -> None:
        """Note that a device has run and sent all that it does, with what it did last."""
        for number, awaited in enumerate(self._awaited):
            if device in awaited:
                self._note(number, device, steps)

    def _note(self, number: int, key: object, steps: list[Step]) -> None:
        self._found[number, key] = steps
        self._awaited[number].discard(key)
        if not self._awaited[number]:
            self._ready.append(number)

    def begin(self, now: float) -> None:
        """Reduce what is ready, one reduction a device at a time."""
        for number in sorted(self._ready):
            sending = sending_of(self._costs.reductions[number], is_fair=self._is_fair)
            self._under_way[sending] = number
            self._traffic.enter(sending, now)
        self._ready.clear()

    def end(self, sending: CheckedSending, now: float) -> bool:
        """Note the end of what was sent, if it is a reduction."""
        if sending not in self._under_way:
            return False
        number = self._under_way.pop(sending)
        reduction = self._costs.reductions[number]
        before = [
            step for key in self._needed(reduction) for step in self._found.get((number, key), ())
        ]
        before += [self.last[device] for device in reduction.devices if device in self.last]
        ring = (*reduction.devices, reduction.devices[0])
        cause = ended_at(sending.start_s, *before)
        done = Step(sending.start_s, now, ring, cause)
        self.last.update(dict.fromkeys(reduction.devices, done))
        return True
