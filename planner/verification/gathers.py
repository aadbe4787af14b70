"""All-gathers of parameters after optimizer steps, by docs/cost_model.md."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from planner.plan.plan import Plan
from planner.verification.costs import PlanCosts
from planner.verification.gradients import sending_of
from planner.verification.steps import Step, ended_at
from planner.verification.traffic import CheckedSending, Traffic


def gathering(plan: Plan, costs: PlanCosts, steps: Mapping[str, Step]) -> list[Step]:
    """Return the all-gathers of an iteration, in the order of the reductions they belong to.

    Args:
        plan: whose devices share the optimizer's state.
        costs: of the plan.
        steps: the optimizer step of each device.
    """
    traffic, is_fair = Traffic(plan.cluster), plan.runtime.links == "fair"
    rows = [(n, row) for n, row in enumerate(costs.reductions) if row.gathers]
    waiting = sorted((max(steps[d].end_s for d in row.devices), n) for n, row in rows)
    under_way: dict[CheckedSending, int] = {}
    last: dict[str, Step] = {}
    done: dict[int, Step] = {}
    now = 0.0
    while (now := min(waiting[0][0] if waiting else inf, traffic.next_s(now))) < inf:
        for sending in traffic.arrived(now):
            number = under_way.pop(sending)
            devices = costs.reductions[number].devices
            before = [*(steps[name] for name in devices)]
            before += [last[name] for name in devices if name in last]
            cause = ended_at(sending.start_s, *before)
            done[number] = Step(sending.start_s, now, (*devices, devices[0]), cause)
            last.update(dict.fromkeys(devices, done[number]))
        while waiting and waiting[0][0] == now:
            number = waiting.pop(0)[1]
            sending = sending_of(costs.reductions[number], is_fair=is_fair)
            under_way[sending] = number
            traffic.enter(sending, now)
        traffic.divide(now)
    return [done[number] for number in sorted(done)]
