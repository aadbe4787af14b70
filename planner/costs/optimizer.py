"""What parameters hold on a device, and the seconds of the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence

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
    moved = {
        group: _held_traffic_bytes(problem.job, [parameters[index] for index in group])
        for group in set(stages_on.values())
    }
    return {
        device: moved[group] / (problem.cluster.device_type(device).optimizer_gb_per_s * 1e9)
        for device, group in stages_on.items()
    }


def _held_traffic_bytes(job: Job, parameters: Sequence[Sequence[Parameter]]) -> int:
    held = {p.name: p for row in parameters for p in row if p.trainable}
    return sum(step_traffic_bytes(job, p.bytes, p.elements) for p in held.values())
