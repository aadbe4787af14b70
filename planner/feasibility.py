"""Why no plan fits: which layers need how much of what, what their device has, what would help."""

from __future__ import annotations

import numpy as np

from planner.errors import InfeasibleError
from planner.partition.chain import Chain
from planner.partition.memory.tight_division import TightDivision, TypedStages
from planner.remedies import remedies
from planner.units import format_bytes, plural

MOST_LAYERS = 1500
"""Of longer chains not every interval is looked at."""


def explain_infeasible(chain: Chain, *, is_proved: bool) -> InfeasibleError:
    """The constraint that binds, with its figures and remedies.

    Args:
        chain: the layers.
        is_proved: whether no plan exists; otherwise none was found.
    """
    verdict = "no plan fits" if is_proved else "no plan was found that fits"
    if chain.length > MOST_LAYERS:
        return InfeasibleError(f"{verdict}: {_sums(chain)}")
    division = TightDivision(chain)
    slack_bytes, stages = division.least_overflow()
    if slack_bytes == 0:
        return InfeasibleError(f"{verdict}: {_not_memory(chain, division, stages)}")
    helps = remedies(chain, division, slack_bytes)
    why = _largest_layer(chain, division) or _worst_stage(chain, division, stages)
    return InfeasibleError(f"{verdict}: {why}; {_advice(helps)}")


def _sums(chain: Chain) -> str:
    """For chains too long for every interval to be looked at: the largest layer, or all of them."""
    cluster = chain.problem.cluster
    least, have = (
        chain.least_bytes,
        [cluster.device_type(d).capacity_bytes for d in cluster.device_names],
    )
    alone = np.diff(least)
    worst = int(alone.argmax())
    if alone[worst] > max(have):
        return (
            f"layer {chain.names[worst]!r} alone needs {format_bytes(int(alone[worst]))} with one "
            f"microbatch, the largest device has {format_bytes(max(have))}; use smaller "
            "microbatches, a lighter optimizer or larger devices"
        )
    return (
        f"the {chain.length:,} layers need {format_bytes(int(least[-1]))} with one microbatch "
        f"each, {_devices(len(have))} {format_bytes(sum(have))} in all; use smaller microbatches, "
        "a lighter optimizer, more or larger devices; where the sum suffices, allow more time"
    )


def _advice(helps: list[str]) -> str:
    if not helps:
        return "no change that was tried helps: fewer or smaller layers are needed"
    return f"what would help: {', or '.join(helps)}"


def _not_memory(chain: Chain, division: TightDivision, stages: TypedStages) -> str:
    """One microbatch fits every stage of a division: what else is in the way."""
    cluster = chain.problem.cluster
    apart = np.argwhere(~np.isfinite(cluster.link_table.latency_s))
    if len(apart):
        first, second = (cluster.device_names[number] for number in apart[0])
        return (
            f"memory would do, but no path of links and switches joins {first!r} and {second!r}, "
            "among others; add links to the cluster"
        )
    bound = [layer for layer in chain.problem.graph.record.layers if layer.device_types]
    if bound:
        return (
            "memory would do, but no stages were found that keep to the device types of their "
            f"layers (layer {bound[0].name!r} runs on {', '.join(bound[0].device_types)} only, "
            f"{len(bound)} of {plural(chain.length, 'layer')} bound so); allow more time, more "
            "device_types in the layer graph or more devices of these types"
        )
    fullest = max(stages, key=lambda stage: _use(chain, division, stage))
    return (
        "one microbatch at a time would fit every stage, but no schedule was found that keeps "
        f"within memory; the fullest are {_need(chain, division, fullest)}; allow more time, use "
        "smaller microbatches or devices with more memory"
    )


def _use(chain: Chain, division: TightDivision, stage: tuple[int, int, str]) -> float:
    """The share of its device's memory that a stage needs."""
    parts = _parts(chain, division, stage[0], stage[1])
    return sum(parts.values()) / chain.problem.cluster.device_types[stage[2]].capacity_bytes


def _need(chain: Chain, division: TightDivision, stage: tuple[int, int, str]) -> str:
    begin, end, kind = stage
    size = format_bytes(sum(_parts(chain, division, begin, end).values()))
    have = format_bytes(chain.problem.cluster.device_types[kind].capacity_bytes)
    return (
        f"layers {chain.names[begin]!r} to {chain.names[end - 1]!r} with {size} of the {have} of "
        f"a device of type {kind!r}"
    )


def _largest_layer(chain: Chain, division: TightDivision) -> str | None:
    """The layer that fits on no device by the most, if there is one."""
    needs = np.diagonal(division.division.need_bytes, 1)
    largest = max(chain.problem.cluster.device_names, key=lambda d: _capacity_bytes(chain, d))
    worst = int(needs.argmax())
    if needs[worst] <= _capacity_bytes(chain, largest):
        return None
    parts = _parts(chain, division, worst, worst + 1)
    return f"layer {chain.names[worst]!r} alone needs {_split(chain, parts, largest, 'largest ')}"


def _worst_stage(chain: Chain, division: TightDivision, stages: TypedStages) -> str:
    """Of the division that overflows least, the stage that overflows most."""
    problem = chain.problem
    first_of = {device.type: device.name for device in reversed(problem.cluster.devices)}
    need_bytes = division.division.need_bytes

    def over_bytes(stage: tuple[int, int, str]) -> float:
        begin, end, kind = stage
        return float(need_bytes[begin, end]) - _capacity_bytes(chain, first_of[kind])

    begin, end, kind = max(stages, key=over_bytes)
    parts = _parts(chain, division, begin, end)
    names = f"layers {chain.names[begin]!r} to {chain.names[end - 1]!r} need"
    if end - begin == 1:
        names = f"layer {chain.names[begin]!r} needs"
    limit = f" (job.max_stages = {problem.job.max_stages})" if problem.job.max_stages else ""
    return (
        f"{_total(chain)}in the best division into {plural(len(stages), 'stage')}{limit} {names} "
        f"{_split(chain, parts, first_of[kind])}"
    )


def _total(chain: Chain) -> str:
    """Said where weights, gradients and optimizer state are too much for all devices together."""
    names = chain.problem.cluster.device_names
    need = int(chain.static_bytes.sum())
    have = sum(_capacity_bytes(chain, device) for device in names)
    if need <= have:
        return ""
    return (
        f"weights, gradients and optimizer state need {format_bytes(need)} in all, "
        f"{_devices(len(names))} {format_bytes(have)}; "
    )


def _devices(count: int) -> str:
    return f"{plural(count, 'device')} {'has' if count == 1 else 'have'}"


def _capacity_bytes(chain: Chain, device: str) -> int:
    return chain.problem.cluster.device_type(device).capacity_bytes


def _parts(chain: Chain, division: TightDivision, begin: int, end: int) -> dict[str, int]:
    """What a stage holds when its first microbatch is in flight, at the least."""
    problem = chain.problem
    parameters = problem.graph.parameters_of(chain.names[begin:end])
    trained = [parameter for parameter in parameters if parameter.trainable]
    per_element = problem.job.optimizer_bytes_per_element
    gradients, name = chain.cut_gradient_bytes, "stash of one microbatch"
    if problem.job.recompute:
        name += " with all recomputed that saves memory"
    parts = {
        "weights": sum(parameter.bytes for parameter in parameters),
        "gradients": sum(parameter.bytes for parameter in trained),
        "optimizer state": sum(per_element * parameter.elements for parameter in trained),
        name: division.least_stash_bytes(begin, end),
        "tensors to and from its neighbours": max(
            int(chain.cut_bytes[end]), int(gradients[begin] + gradients[end])
        ),
    }
    need_bytes = int(division.division.need_bytes[begin, end])
    return parts | {"workspace": need_bytes - sum(parts.values())}


def _split(chain: Chain, parts: dict[str, int], device: str, which: str = "") -> str:
    """A sum with its parts, the device that should hold it, and what is missing."""
    need, have = sum(parts.values()), _capacity_bytes(chain, device)
    each = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return (
        f"{format_bytes(need)} ({each}), the {which}device {device!r} has {format_bytes(have)}: "
        f"{format_bytes(need - have)} too little"
    )
