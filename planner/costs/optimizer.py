"""What parameters hold on a device, and the seconds of the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.cluster.hardware import DeviceType
from planner.job import Job
from planner.model.graph_record import Parameter
from planner.plan.problem import Problem


def static_bytes(problem: Problem, parameters: Sequence[Parameter]) -> int:
    """Return the bytes of weights, gradients and optimizer state of parameters."""
    per_element = problem.job.optimizer_bytes_per_element
    return sum(
        p.bytes + (p.bytes + per_element * p.elements if p.trainable else 0) for p in parameters
    )


def step_traffic_bytes(job: Job, parameter_bytes: int, elements: int) -> int:
    """Return the bytes that a step moves: weights and state read and written, gradients read."""
    return 3 * parameter_bytes + 2 * job.optimizer_bytes_per_element * elements


def optimizer_s(
    problem: Problem, devices: Sequence[Sequence[str]], parameters: Sequence[Sequence[Parameter]]
) -> dict[str, float]:
    """Return the seconds of each device's step, limited by memory bandwidth.

    A tensor-parallel group first sums the gradients of what all its devices have but use in part.
    A parameter that several stages of a device hold counts once.

    Args:
        problem: the cluster and the job.
        devices: of each stage.
        parameters: that each stage holds.
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
        device: _step_s(problem.job, problem.cluster.device_type(device), held[stages])
        for device, stages in stages_on.items()
    }


def _step_s(job: Job, kind: DeviceType, parameters: Iterable[Parameter]) -> float:
    rows = list(parameters)
    moved = sum(step_traffic_bytes(job, p.bytes, p.elements) for p in rows)
    seconds = moved / (kind.optimizer_gb_per_s * 1e9)
    if kind.group is None:
        return seconds
    summed = sum(p.bytes for p in rows if p.summed) // kind.group.devices
    return seconds + kind.group.seconds("all_reduce", summed)
