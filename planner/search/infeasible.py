"""Why no plan was found: rules in conflict, or what does not fit, with its figures and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.costs.network_table import NetworkTable
from planner.costs.optimizer import static_bytes
from planner.costs.stage_table import StageTable
from planner.errors import InfeasibleError
from planner.plan.problem import Problem
from planner.plan.runtimes import never_cut
from planner.search.cp_sat.conflicts import conflict
from planner.search.cp_sat.decisions import Constrain
from planner.search.cp_sat.plan_model import Effort
from planner.search.needs import Needs, Stage
from planner.search.remedies import Quick, missing_freedoms, remedies
from planner.search.variants import Variant
from planner.units import format_bytes, plural

CONFLICT_S = 5.0
"""Deterministic seconds of each solve that looks for rules in conflict."""
MOST_LAYERS = 1500
"""Longer chains are explained by sums alone, without their intervals."""


def why_nothing_fits(
    variants: Sequence[Variant], constrain: Constrain | None, quick: Quick
) -> InfeasibleError:
    """Return why no plan of a problem was found.

    Args:
        variants: the problem with each size of tensor-parallel groups that was searched.
        constrain: constraints of the caller.
        quick: a short search, to try out remedies.
    """
    if not variants[0].problem.job.rules.is_empty:
        blamed = [_conflict(row.problem) for row in variants]
        if all(blamed):
            names = ", ".join(dict.fromkeys(name for row in blamed for name in row))
            return InfeasibleError(
                f"no plan keeps these rules of the job together: {names}; drop or relax one",
                is_proved=True,
            )
    if constrain is not None:
        return InfeasibleError(
            "no plan was found that keeps the constraints added by constrain=; solve without them, "
            "or one by one, to see which of them, or the memory, is in the way"
        )
    errors = [explain(row.problem, quick) for row in variants]
    if len(variants) == 1:
        return errors[0]
    told = [
        f"{variant.words}: {problem}"
        for variant, error in zip(variants, errors, strict=True)
        for problem in error.problems
    ]
    return InfeasibleError(told, is_proved=all(error.is_proved for error in errors))


def _conflict(problem: Problem) -> tuple[str, ...]:
    """Return rules of the job that no plan keeps together; empty if none are known to be."""
    effort = Effort(CONFLICT_S, deterministic=True)
    return conflict(StageTable(problem), NetworkTable.of(problem.cluster), effort)


def explain(problem: Problem, quick: Quick) -> InfeasibleError:
    """Return an error that names the constraint that binds, its figures and remedies.

    Args:
        problem: of which no plan was found.
        quick: a short search, to try out remedies.
    """
    found = [f"no plan fits: {why}"] if (why := why_no_form(problem)) else None
    is_proved = found is not None
    if found is None:
        why, is_proved = _why_not_memory(problem, quick)
        found = [f"{'no plan fits' if is_proved else 'no plan was found that fits'}: {why}"]
    freedoms = list(missing_freedoms(problem, quick))
    if freedoms:
        found[-1] += f"; {', or '.join(freedoms)}"
    return InfeasibleError(found, is_proved=is_proved)


def why_no_form(problem: Problem) -> str | None:
    """Return why no stages can be as many as the job asks for; None if some can."""
    job, devices = problem.job, len(problem.cluster.devices)
    layers = len(problem.graph.layers)
    pieces = layers if job.cuts is None else min(layers, len(job.cuts) + 1)
    asks = "job.min_stages asks for" if job.runtime is None else f"{job.runtime} needs"
    least = f"{asks} at least {plural(job.min_stages, 'stage')}"
    if pieces < job.min_stages and job.cuts is not None:
        never = never_cut(job.runtime)
        where = f" (never {never})" if never else ""
        return f"{least}, but may cut the layers at {plural(len(job.cuts), 'place')} only{where}"
    if pieces < job.min_stages:
        return f"{least}, but the model has {plural(layers, 'layer')}"
    if devices * job.max_stages_per_device < job.min_stages or (
        devices == 1 < job.min_stages and job.placement != "any"
    ):
        return f"{least} on several devices, but the cluster has {plural(devices, 'device')}"
    return None


def _why_not_memory(problem: Problem, quick: Quick) -> tuple[str, bool]:
    """Return what is in the way, and whether that proves that no plan exists."""
    if len(problem.graph.layers) > MOST_LAYERS:
        return _sums(problem), False
    needs = Needs(problem)
    try:
        slack_bytes, stages = needs.least_overflow()
    except OverflowError:
        return _sums(problem), False
    if slack_bytes == 0:
        return _other_reason(needs, stages), False
    helps = remedies(problem, needs, slack_bytes, quick)
    advice = (
        f"what would help: {', or '.join(helps)}" if helps else "no change that was tried helps"
    )
    why = _largest_layer(needs) or _worst_stage(needs, stages)
    return f"{why}; {advice}", problem.job.max_stages_per_device == 1


def _sums(problem: Problem) -> str:
    """Explain by sums alone, for problems too large to look at every division."""
    need, have = _static_and_capacity(problem)
    return (
        f"weights, gradients and optimizer state need {format_bytes(need)}, {_devices(problem)} "
        f"{format_bytes(have)} in all; use smaller microbatches, a lighter optimizer, more or "
        "larger devices; where the sum suffices, allow more time"
    )


def _other_reason(needs: Needs, stages: Sequence[Stage]) -> str:
    """Explain what else is in the way where one microbatch fits every stage."""
    cluster = needs.problem.cluster
    apart = np.argwhere(~np.isfinite(cluster.link_table.latency_s))
    if len(apart):
        first, second = (cluster.device_names[number] for number in apart[0])
        return (
            f"memory would do, but no path of links and switches joins {first!r} and {second!r}, "
            "among others; add links to the cluster"
        )
    bound = [layer for layer in needs.problem.graph.record.layers if layer.device_types]
    if bound:
        return (
            "memory would do, but no stages were found that keep to the device types of their "
            f"layers (layer {bound[0].name!r} runs on {', '.join(bound[0].device_types)} only, "
            f"{len(bound)} of {plural(len(needs.names), 'layer')} bound so); allow more time, more "
            "device_types in the layer graph or more devices of these types"
        )
    fullest = max(stages, key=lambda stage: needs.need(*stage) / needs.capacities[stage.type])
    size, have = needs.need(*fullest), needs.capacities[fullest.type]
    return (
        "one microbatch at a time would fit every stage, but no schedule was found that keeps "
        f"within memory; the fullest are layers {_ends(needs, fullest)} with {format_bytes(size)} "
        f"of the {format_bytes(have)} of a device of type {fullest.type!r}; allow more time, use "
        "smaller microbatches or devices with more memory"
    )


def _ends(needs: Needs, stage: Stage) -> str:
    return f"{needs.names[stage.begin]!r} to {needs.names[stage.end - 1]!r}"


def _largest_layer(needs: Needs) -> str | None:
    """Describe the layer that fits on no device by the most, if there is one."""
    largest = max(needs.problem.cluster.devices, key=lambda d: needs.capacities[d.type])
    device, kind = largest.name, largest.type
    begin, end = max(pairwise(needs.places), key=lambda cell: needs.need(cell[0], cell[1], kind))
    stage = Stage(begin, end, kind)
    if needs.need(*stage) <= needs.capacities[kind]:
        return None
    alone = f"layer {needs.names[begin]!r} alone needs"
    if end - begin > 1:
        alone = f"layers {_ends(needs, stage)}, which job.cuts keeps together, need"
    return f"{alone} {_parts(needs, stage, device, 'largest ')}"


def _worst_stage(needs: Needs, stages: Sequence[Stage]) -> str:
    """Describe the stage that overflows most in the division that overflows least."""
    cluster, job = needs.problem.cluster, needs.problem.job
    stage = max(stages, key=lambda row: needs.need(*row) - needs.capacities[row.type])
    names = f"layers {_ends(needs, stage)} need"
    if stage.end - stage.begin == 1:
        names = f"layer {needs.names[stage.begin]!r} needs"
        roomiest = max(needs.types, key=lambda name: needs.capacities[name])
        if needs.need(stage.begin, stage.end, roomiest) <= needs.capacities[roomiest]:
            names = (
                f"layer {needs.names[stage.begin]!r}, which fits on a device of type "
                f"{roomiest!r}, is left for a smaller one and needs"
            )
    limit = f" (job.max_stages = {job.max_stages})" if job.max_stages else ""
    device = next(device.name for device in cluster.devices if device.type == stage.type)
    return (
        f"{_total(needs, stages)}in the best division into {plural(len(stages), 'stage')}{limit} "
        f"{names} {_parts(needs, stage, device)}"
    )


def _total(needs: Needs, stages: Sequence[Stage]) -> str:
    """Say that the model is too much for all devices together, if it is."""
    need, have = _static_and_capacity(needs.problem)
    what = "weights, gradients and optimizer state need"
    if need <= have:
        what = "the stages of the best division need"
        need = sum(needs.need(*stage) for stage in stages)
    if need <= have:
        return ""
    return f"{what} {format_bytes(need)} in all, {_devices(needs.problem)} {format_bytes(have)}; "


def _static_and_capacity(problem: Problem) -> tuple[int, int]:
    """Return the bytes that a plan without microbatches takes, and those of all devices."""
    types = problem.cluster.device_types
    have = sum(types[device.type].capacity_bytes for device in problem.cluster.devices)
    return static_bytes(problem, problem.graph.record.parameters), have


def _devices(problem: Problem) -> str:
    count = len(problem.cluster.devices)
    return f"{plural(count, 'device')} {'has' if count == 1 else 'have'}"


def _parts(needs: Needs, stage: Stage, device: str, which: str = "") -> str:
    """Describe what a stage needs by its parts, the device that should hold it, what is missing."""
    parts, have = needs.parts(stage), needs.capacities[stage.type]
    need = sum(parts.values())
    each = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return (
        f"{format_bytes(need)} ({each}), the {which}device {device!r} has {format_bytes(have)}: "
        f"{format_bytes(need - have)} too little"
    )
