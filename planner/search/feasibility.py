"""Why no plan fits: which layers need how much of what, what their device has, what would help.

Each remedy is tried out before it is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from planner.cluster.hardware import GIB
from planner.costs.gradients import gradient_bytes
from planner.costs.optimizer import most_holders, static_bytes
from planner.errors import InfeasibleError
from planner.job import Job
from planner.model.graph_record import Parameter
from planner.plan.problem import Problem
from planner.plan.runtimes import never_cut
from planner.search.partition.chain import Chain
from planner.search.partition.memory.division import TightDivision, TypedStages
from planner.units import format_bytes, plural
from planner.variants.microbatches import resized
from planner.variants.problems import with_job, with_memory

MOST_LAYERS = 1500
"""Longer chains are explained by sums alone, without their intervals."""


def explain_infeasible(chain: Chain, *, is_proved: bool) -> InfeasibleError:
    """Return an error that names the constraint that binds, its figures and remedies.

    Args:
        chain: the layers.
        is_proved: whether no plan exists; otherwise none was found.
    """
    verdict = "no plan fits" if is_proved else "no plan was found that fits"
    if form := form_problem(chain):
        return InfeasibleError(f"no plan fits: {form}", is_proved=True)
    if chain.length > MOST_LAYERS:
        return InfeasibleError(f"{verdict}: {_sums(chain)}", is_proved=is_proved)
    division = TightDivision(chain)
    slack_bytes, stages = division.least_overflow()
    if slack_bytes == 0:
        return InfeasibleError(
            f"{verdict}: {_not_memory(chain, division, stages)}", is_proved=is_proved
        )
    helps = remedies(chain, division, slack_bytes)
    why = _largest_layer(chain, division) or _worst_stage(chain, division, stages)
    return InfeasibleError(f"{verdict}: {why}; {_advice(helps)}", is_proved=is_proved)


def form_problem(chain: Chain) -> str | None:
    """Return why no partition can have as many stages as the job asks for; None if some can."""
    job, devices = chain.problem.job, len(chain.problem.cluster.devices)
    least = f"{_asks(job)} at least {plural(job.min_stages, 'stage')}"
    if chain.stage_limit < job.min_stages and job.cuts is not None:
        never = never_cut(job.runtime)
        where = f" (never {never})" if never else ""
        return f"{least}, but may cut the layers at {plural(len(job.cuts), 'place')} only{where}"
    if chain.stage_limit < job.min_stages:
        return f"{least}, but the model has {plural(chain.length, 'layer')}"
    if devices * job.max_stages_per_device < job.min_stages or (
        devices == 1 < job.min_stages and job.placement != "any"
    ):
        return f"{least} on several devices, but the cluster has {plural(devices, 'device')}"
    return None


def _asks(job: Job) -> str:
    return "job.min_stages asks for" if job.runtime is None else f"{job.runtime} needs"


def _sums(chain: Chain) -> str:
    """Explain by sums alone, for chains too long to look at every interval."""
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
    """Explain what else is in the way where one microbatch fits every stage."""
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
    """Return the share of its device's memory that a stage needs."""
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
    """Describe the layer that fits on no device by the most, if there is one."""
    need_bytes = division.division.need_bytes
    largest = max(chain.problem.cluster.device_names, key=lambda d: _capacity_bytes(chain, d))
    begin, end = max(pairwise(chain.cuts), key=lambda cell: float(need_bytes[cell]))
    if need_bytes[begin, end] <= _capacity_bytes(chain, largest):
        return None
    parts = _parts(chain, division, begin, end)
    alone = f"layer {chain.names[begin]!r} alone needs"
    if end - begin > 1:
        alone = (
            f"layers {chain.names[begin]!r} to {chain.names[end - 1]!r}, which job.cuts keeps "
            "together, need"
        )
    return f"{alone} {_split(chain, parts, largest, 'largest ')}"


def _worst_stage(chain: Chain, division: TightDivision, stages: TypedStages) -> str:
    """Describe the stage that overflows most in the division that overflows least."""
    problem = chain.problem
    first_of = {device.type: device.name for device in reversed(problem.cluster.devices)}
    need_bytes = division.division.need_bytes

    def over_bytes(stage: tuple[int, int, str]) -> float:
        begin, end, kind = stage
        return float(need_bytes[begin, end]) - _capacity_bytes(chain, first_of[kind])

    whole_bytes = sum(float(need_bytes[begin, end]) for begin, end, _ in stages)
    begin, end, kind = max(stages, key=over_bytes)
    parts = _parts(chain, division, begin, end)
    names = f"layers {chain.names[begin]!r} to {chain.names[end - 1]!r} need"
    if end - begin == 1:
        names = f"layer {chain.names[begin]!r} needs"
        roomiest = _roomiest(chain)
        if need_bytes[begin, end] <= problem.cluster.device_types[roomiest].capacity_bytes:
            names = (
                f"layer {chain.names[begin]!r}, which fits on a device of type {roomiest!r}, is "
                "left for a smaller one and needs"
            )
    limit = f" (job.max_stages = {problem.job.max_stages})" if problem.job.max_stages else ""
    return (
        f"{_total(chain, whole_bytes)}in the best division into "
        f"{plural(len(stages), 'stage')}{limit} {names} "
        f"{_split(chain, parts, first_of[kind])}"
    )


def _total(chain: Chain, division_bytes: float) -> str:
    """Say that the model is too much for all devices together, if it is.

    Args:
        chain: the layers.
        division_bytes: what the stages of the best division need together.
    """
    names = chain.problem.cluster.device_names
    state = static_bytes(chain.problem, chain.problem.graph.record.parameters)
    have = sum(_capacity_bytes(chain, device) for device in names)
    what, need = "weights, gradients and optimizer state need", state
    if state <= have:
        what, need = "the stages of the best division need", int(division_bytes)
    if need <= have:
        return ""
    return f"{what} {format_bytes(need)} in all, {_devices(len(names))} {format_bytes(have)}; "


def _devices(count: int) -> str:
    return f"{plural(count, 'device')} {'has' if count == 1 else 'have'}"


def _capacity_bytes(chain: Chain, device: str) -> int:
    return chain.problem.cluster.device_type(device).capacity_bytes


def _parts(chain: Chain, division: TightDivision, begin: int, end: int) -> dict[str, int]:
    """Return the least that a stage holds when its first microbatch is in flight, by part."""
    problem = chain.problem
    parameters = problem.graph.parameters_of(chain.names[begin:end])
    trained = [parameter for parameter in parameters if parameter.trainable]
    per_element, holders = problem.job.optimizer_bytes_per_element, most_holders(problem)
    gradients, name = chain.cut_gradient_bytes, "stash of one microbatch"
    if problem.job.recompute:
        name += " with all recomputed that saves memory"

    def least_bytes(parameter: Parameter, bytes_: int) -> int:
        return -(-bytes_ // holders) if parameter.name in problem.divided_parameters else bytes_

    parts = {
        "weights": sum(least_bytes(row, row.bytes) for row in parameters),
        "gradients": sum(least_bytes(row, gradient_bytes(problem.job, row)) for row in trained),
        "optimizer state": sum(per_element * -(-p.elements // holders) for p in trained),
        name: division.least_stash_bytes(begin, end),
        "tensors to and from its neighbours": max(
            int(chain.cut_bytes[end]), int(gradients[begin] + gradients[end])
        ),
    }
    need_bytes = int(division.division.need_bytes[begin, end])
    return parts | {"workspace": need_bytes - sum(parts.values())}


def _split(chain: Chain, parts: dict[str, int], device: str, which: str = "") -> str:
    """Describe a sum with its parts, the device that should hold it, and what is missing."""
    need, have = sum(parts.values()), _capacity_bytes(chain, device)
    each = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return (
        f"{format_bytes(need)} ({each}), the {which}device {device!r} has {format_bytes(have)}: "
        f"{format_bytes(need - have)} too little"
    )


OPTIMIZERS = ("adamw", "sgd_momentum", "sgd")
"""Optimizers from the most state to none."""


def remedies(chain: Chain, division: TightDivision, slack_bytes: float) -> list[str]:
    """Return changes, each with its figure, that make every stage fit with one microbatch.

    Args:
        chain: a problem that does not fit.
        division: of its layers.
        slack_bytes: what every device lacks for some division to fit.
    """
    changes = list(_job_changes(chain.problem))
    found = [text for text, changed in changes if fits(changed)]
    if not found:
        found = _together(chain.problem)
    return [*found, *_more_devices(chain, division), *_more_memory(chain, division, slack_bytes)]


def fits(problem: Problem) -> bool:
    """Return whether some division of the layers fits, one microbatch in flight."""
    return TightDivision(Chain(problem)).divide() is not None


def _job_changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield single settings of the job that need less memory."""
    job = problem.job
    if not job.recompute:
        yield "recompute = true", with_job(problem, recompute=True)
    if job.max_stages is not None:
        unlimited = with_job(problem, max_stages=None)
        stages = TightDivision(Chain(unlimited)).divide()
        if stages is not None:
            yield f"max_stages = {len(stages)}", with_job(problem, max_stages=len(stages))
    yield from _lighter_optimizer(problem)
    yield from _smaller_microbatch(problem)


def _lighter_optimizer(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the heaviest that fits; else the lightest, which may help with others."""
    lighter = OPTIMIZERS[OPTIMIZERS.index(problem.job.optimizer) + 1 :]
    changes = [(f'optimizer = "{name}"', with_job(problem, optimizer=name)) for name in lighter]
    yield from _first_that_fits(changes)


def _smaller_microbatch(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the largest power of two less that fits, if activations shrink in proportion."""
    samples, changes = problem.job.samples_per_microbatch, []
    while samples > 1:
        samples //= 2
        text = f"samples_per_microbatch = {samples} (trace the model again)"
        changes.append((text, resized(problem, samples)))
    yield from _first_that_fits(changes)


def _first_that_fits(changes: list[tuple[str, Problem]]) -> list[tuple[str, Problem]]:
    return next(([change] for change in changes if fits(change[1])), changes[-1:])


def _together(problem: Problem) -> list[str]:
    """Return as many settings of the job at once as it takes."""
    texts: list[str] = []
    while True:
        step = next((c for c in _job_changes(problem) if c[0] not in texts), None)
        if step is None:
            return []
        text, problem = step
        texts.append(text)
        if fits(problem):
            return [" with ".join(texts)]


def _more_devices(chain: Chain, division: TightDivision) -> list[str]:
    """Return the fewest more of the roomiest type, if any number helps."""
    kind = _roomiest(chain)
    low, high = 0, chain.length
    if TightDivision(chain, {kind: high}, division).divide() is None:
        return []
    while high - low > 1:
        middle = (low + high) // 2
        if TightDivision(chain, {kind: middle}, division).divide() is None:
            low = middle
        else:
            high = middle
    return [f"{plural(high, 'more device')} of type {kind!r}"]


def _more_memory(chain: Chain, division: TightDivision, slack_bytes: float) -> list[str]:
    """Return more memory on the roomiest type alone, or on every device.

    The table of needs leaves out what several layers share; a little more is tried for that.
    """
    kind, problem = _roomiest(chain), chain.problem
    kinds = problem.cluster.device_types
    most = float(max(division.division.need_bytes[cell] for cell in pairwise(chain.cuts)))
    lacking = max(slack_bytes, most - kinds[kind].capacity_bytes)
    for more in (1.0, 1.05, 1.2, 1.5):
        size = kinds[kind].memory_gib + more * lacking / GIB
        size = math.ceil(size * 100) / 100
        if fits(with_memory(problem, {kind: size})):
            return [f"devices of type {kind!r} with memory_gib = {size:g}"]
        extra = math.ceil(more * slack_bytes / GIB * 100) / 100
        if fits(with_memory(problem, {t: kinds[t].memory_gib + extra for t in kinds})):
            return [f"{extra:g} GiB more on every device"]
    return []


def _roomiest(chain: Chain) -> str:
    kinds = chain.problem.cluster.device_types
    return max(chain.types, key=lambda name: kinds[name].capacity_bytes)
