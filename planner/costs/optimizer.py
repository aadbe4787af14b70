"""What parameters hold on a device, and the seconds of the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from planner.cluster.hardware import DeviceType
from planner.costs.gradients import gradient_bytes
from planner.costs.reductions import reduces_in_turn
from planner.job import Job
from planner.model.graph_record import Parameter
from planner.plan.problem import Problem


def static_bytes(
    problem: Problem, parameters: Iterable[Parameter], holders: Mapping[str, int] | int = 1
) -> int:
    """Return the bytes of weights, gradients and optimizer state of parameters on a device.

    Of parameters that replicas divide, a device has its part of the weights and gradients as well.

    Args:
        problem: whose job has the precision and the optimizer.
        parameters: that the device holds.
        holders: how many devices share a parameter's optimizer state, of all or by name
            (:func:`state_holders`); by default it is whole.
    """
    per_element = problem.job.optimizer_bytes_per_element
    total = 0
    for row in parameters:
        count = holders if isinstance(holders, int) else holders.get(row.name, 1)
        parts = count if row.name in problem.divided_parameters else 1
        total += -(-row.bytes // parts)
        if row.trainable:
            total += -(-gradient_bytes(problem.job, row) // parts)
            total += per_element * -(-row.elements // count)
    return total


def state_holders(
    problem: Problem,
    devices: Sequence[Sequence[str]],
    parameters: Sequence[Sequence[Parameter]],
    copies: int = 1,
) -> dict[str, int]:
    """Return how many devices share the optimizer state of each parameter that several hold.

    That of a parameter is shared by all devices that reduce its gradient: the replicas of its
    stage, or of all stages that hold a tied one (Rajbhandari et al. 2020, "ZeRO", section 5.1),
    unless these reduce it in turn, each its replicas first.

    Args:
        problem: whose job says whether state is shared at all.
        devices: of each stage.
        parameters: that each stage holds.
        copies: equal groups of such devices that reduce their gradients together.
    """
    if not problem.job.shards_state:
        return {}
    held: dict[str, list[int]] = {}
    for stage, rows in enumerate(parameters):
        for row in rows:
            held.setdefault(row.name, []).append(stage)
    counts: dict[str, int] = {}
    for name, stages in held.items():
        of_one = reduces_in_turn(problem, devices, stages)
        sharing = stages[:1] if of_one else stages
        counts[name] = len({device for stage in sharing for device in devices[stage]}) * copies
    return {name: count for name, count in counts.items() if count > 1}


def most_holders(problem: Problem) -> int:
    """Return how many devices share a parameter's optimizer state in any plan, at most."""
    return len(problem.cluster.devices) * problem.copies if problem.job.shards_state else 1


def step_traffic_bytes(job: Job, parameter: Parameter) -> int:
    """Return the bytes that a step moves: weights and state read and written, gradients read."""
    state_bytes = job.optimizer_bytes_per_element * parameter.elements
    return 2 * parameter.bytes + gradient_bytes(job, parameter) + 2 * state_bytes


def optimizer_s(
    problem: Problem,
    devices: Sequence[Sequence[str]],
    parameters: Sequence[Sequence[Parameter]],
    holders: Mapping[str, int],
) -> dict[str, float]:
    """Return the seconds of each device's step, limited by memory bandwidth.

    A tensor-parallel group first sums the gradients of what all its devices have but use in part.
    A parameter that several stages of a device hold counts once, and one whose state is shared
    with the device's part of it.

    Args:
        problem: the cluster and the job.
        devices: of each stage.
        parameters: that each stage holds.
        holders: of :func:`state_holders`.
    """
    stages_on: dict[str, tuple[int, ...]] = {}
    for index, names in enumerate(devices):
        for device in names:
            stages_on[device] = (*stages_on.get(device, ()), index)
    held = {
        stages: {p.name: p for index in stages for p in parameters[index] if p.trainable}.values()
        for stages in set(stages_on.values())
    }
    return {
        device: _step_s(problem.job, problem.cluster.device_type(device), held[stages], holders)
        for device, stages in stages_on.items()
    }


def _step_s(
    job: Job, kind: DeviceType, parameters: Iterable[Parameter], holders: Mapping[str, int]
) -> float:
    rows = list(parameters)
    moved = sum(step_traffic_bytes(job, p) / holders.get(p.name, 1) for p in rows)
    return moved / (kind.optimizer_gb_per_s * 1e9) + summing_s(job, kind, rows)


def summing_s(job: Job, kind: DeviceType, parameters: Iterable[Parameter]) -> float:
    """Return the seconds in which a group sums gradients of what each of its devices has whole.

    Args:
        job: whose gradients.
        kind: the type of the group; a single device sums none.
        parameters: that it holds, each once.
    """
    if kind.group is None:
        return 0.0
    summed = sum(gradient_bytes(job, p) for p in parameters if p.summed) // kind.group.devices
    return kind.group.seconds("all_reduce", summed)
