"""Interleaved 1F1B, for stages that loop around the devices."""

from itertools import pairwise

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.schedule.assignment import Assignment
from planner.schedule.classics.placements import loop_of
from planner.simulator import Orders


def interleaved_one_forward_one_backward(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Microbatches go through a device's chunks in rounds of about D; then 1F1B over all of them.

    Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters",
    section 2.2, for numbers of microbatches that are multiples of the D devices. Others are cut
    into rounds that differ by one at most.

    Raises:
        DoesNotApplyError: if the stages do not loop around the devices, or a stage has replicas.
    """
    del owner  # Without replicas there is no choice.
    devices = loop_of(pipeline)
    chunks = len(pipeline.stages) // len(devices)
    rounds = _rounds(pipeline.microbatches, len(devices))
    orders: dict[str, list[Operation]] = {}
    for number, device in enumerate(devices):
        stages = range(number, len(pipeline.stages), len(devices))
        forward = [Operation(s, "F", m) for row in rounds for s in stages for m in row]
        backward = [Operation(s, "B", m) for row in rounds for s in reversed(stages) for m in row]
        ahead = (chunks - 1) * len(rounds[0]) + 2 * (len(devices) - 1 - number)
        orders[device] = _one_after_another(forward, backward, min(ahead, len(forward)))
    return orders


def _rounds(microbatches: int, devices: int) -> list[range]:
    count = max(1, microbatches // devices)
    each, more = divmod(microbatches, count)
    ends = [0]
    for number in range(count):
        ends.append(ends[-1] + each + (number < more))
    return [range(first, end) for first, end in pairwise(ends)]


def _one_after_another(
    forward: list[Operation], backward: list[Operation], ahead: int
) -> list[Operation]:
    """So many forwards, then a forward and a backward in turn, then the backwards left."""
    order = forward[:ahead]
    for done, operation in enumerate(forward[ahead:]):
        order += [operation, backward[done]]
    return order + backward[len(forward) - ahead :]
