"""Changes worth valuing, derived from an explanation of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

from planner.analysis.explain import Explanation
from planner.analysis.explain.path_shares import PathShare
from planner.costs.placed_pipeline import PlacedPipeline
from planner.job import MAX_MICROBATCHES
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.runtimes import is_expressible
from planner.simulation.timeline import TransferEvent
from planner.variants.changes import (
    FREEDOMS,
    AnotherDevice,
    Change,
    DeviceChange,
    LinkChange,
    MicrobatchChange,
    SpaceChange,
    StashChange,
)
from planner.variants.microbatches import has_measured_times
from planner.variants.problems import with_job

MOST = 3
"""The number of most promising changes of each kind."""
LEAST_SHARE = 0.001
"""Share of the critical path below which no change is proposed."""
LATENCY_SHARE = 0.2
"""A link's latency is asked for if so much of a transfer's time on the path is latency."""
MORE_SPEED, MORE_MEMORY, MORE_BANDWIDTH, LESS_LATENCY = 1.2, 1.2, 2.0, 0.5


def default_changes(
    plan: Plan, explanation: Explanation, *, solve_anew: bool = False
) -> tuple[Change, ...]:
    """Return changes of what the critical path and full memories suggest.

    Args:
        plan: that is explained.
        explanation: of its replay.
        solve_anew: also what only solving again can value: one device more of each type in use,
            and each freedom that the job gives or does not give.
    """
    pipeline = explanation.pipeline
    found = [
        *_link_changes(explanation),
        *_speed_changes(explanation),
        *_memory_changes(explanation),
        *_recompute_changes(explanation),
        *(_microbatch_changes(plan.problem) if plan.tensor_parallel is None else ()),
        *((*_another(pipeline), *_space_changes(plan.problem)) if solve_anew else ()),
    ]
    return tuple(dict.fromkeys(found))


def _shares(explanation: Explanation, cause: str) -> list[PathShare]:
    return [
        share
        for share in explanation.shares
        if share.spent.cause == cause and share.share >= LEAST_SHARE
    ]


# --- links ----------------------------------------------------------------------------------------


def _link_changes(explanation: Explanation) -> Iterator[Change]:
    cluster = explanation.pipeline.problem.cluster
    known = {"-".join(link.between): link for link in cluster.links}
    seen: set[tuple[float, float]] = set()
    for name in _links_of_path(explanation)[:MOST]:
        yield LinkChange(name, "bandwidth", MORE_BANDWIDTH)
        figures = [(link.bandwidth_gb_per_s, link.latency_us) for link in cluster.links]
        own = (known[name].bandwidth_gb_per_s, known[name].latency_us)
        if figures.count(own) > 1 and own not in seen:
            yield LinkChange(name, "bandwidth", MORE_BANDWIDTH, alike=True)
        seen.add(own)
        if _is_mostly_latency(explanation, name):
            yield LinkChange(name, "latency", LESS_LATENCY)


def _links_of_path(explanation: Explanation) -> list[str]:
    """Return the links that the critical path waits for, the most time first."""
    seconds: dict[str, float] = {}
    pipeline = explanation.pipeline
    for share in _shares(explanation, "transfers"):
        name = _link_named(pipeline, share.spent.on[0])
        if name is not None:
            seconds[name] = seconds.get(name, 0.0) + share.seconds
    for share in (*_shares(explanation, "all-reduce"), *_shares(explanation, "all-gather")):
        name = _narrowest_link(pipeline, share.spent.on)
        if name is not None:
            seconds[name] = seconds.get(name, 0.0) + share.seconds
    return sorted(seconds, key=lambda name: -seconds[name])


def _link_named(pipeline: PlacedPipeline, resource: str) -> str | None:
    """Return the link ``u-v`` of a resource; of a shared one the narrowest between its devices."""
    cluster = pipeline.problem.cluster
    for link in cluster.links:
        u, v = link.between
        if resource in (f"{u}>{v}", f"{v}>{u}", f"{u}-{v}"):
            return f"{u}-{v}"
    source, _, target = resource.partition(">")
    return _narrowest_link(pipeline, (source, target))


def _narrowest_link(pipeline: PlacedPipeline, devices: tuple[str, ...]) -> str | None:
    """Return the narrowest link between devices around a ring, shared ones left out."""
    cluster = pipeline.problem.cluster
    found: dict[int, float] = {}
    for u, v in pairwise((*devices, devices[0])):
        route = cluster.route(u, v)
        for index, _ in route.links if route is not None else ():
            found[index] = cluster.links[index].bandwidth_gb_per_s
    if not found:
        return None
    return "-".join(cluster.links[min(found, key=lambda index: (found[index], index))].between)


def _is_mostly_latency(explanation: Explanation, name: str) -> bool:
    cluster = explanation.pipeline.problem.cluster
    latency_s = max(
        link.latency_us * 1e-6 for link in cluster.links if "-".join(link.between) == name
    )
    seconds = [
        step.seconds
        for step in explanation.critical_path
        if isinstance(step.event, TransferEvent)
        and any("-".join(cluster.links[i].between) == name for i, _ in step.event.links)
    ]
    return bool(seconds) and latency_s * len(seconds) > LATENCY_SHARE * sum(seconds)


# --- devices --------------------------------------------------------------------------------------


def _speed_changes(explanation: Explanation) -> Iterator[Change]:
    cluster = explanation.pipeline.problem.cluster
    seconds: dict[str, float] = {}
    for share in _shares(explanation, "computation"):
        device = share.spent.on[0]
        seconds[device] = seconds.get(device, 0.0) + share.seconds
    ranked = sorted(seconds, key=lambda device: -seconds[device])
    for device in ranked[:MOST]:
        yield DeviceChange("device", device, "speed", MORE_SPEED)
    types = list(dict.fromkeys(cluster.type_of(device) for device in ranked))
    for kind in types[:MOST]:
        if _several(cluster.type_of(device) == kind for device in explanation.pipeline.devices):
            yield DeviceChange("type", kind, "speed", MORE_SPEED)


def _several(flags: Iterator[bool]) -> bool:
    return sum(flags) > 1


def _memory_changes(explanation: Explanation) -> Iterator[Change]:
    """Yield more memory for full devices and for those that recompute."""
    cluster = explanation.pipeline.problem.cluster
    short = [
        device
        for device in explanation.pipeline.devices
        if device in explanation.memory.full or _recomputes(explanation.pipeline, device)
    ]
    for device in short[:MOST]:
        yield DeviceChange("device", device, "memory", MORE_MEMORY)
    types = list(dict.fromkeys(cluster.type_of(device) for device in short))
    for kind in types[:MOST]:
        if _several(cluster.type_of(device) == kind for device in short):
            yield DeviceChange("type", kind, "memory", MORE_MEMORY)


def _recomputes(pipeline: PlacedPipeline, device: str) -> bool:
    return any(pipeline.stages[stage].spec.recompute for stage in pipeline.stages_on[device])


def _another(pipeline: PlacedPipeline) -> Iterator[Change]:
    """Yield one device more of each type in use."""
    cluster = pipeline.problem.cluster
    first: dict[str, str] = {}
    for device in cluster.device_names:
        if device in pipeline.stages_on:
            first.setdefault(cluster.type_of(device), device)
    for device in list(first.values())[:MOST]:
        yield AnotherDevice(device)


# --- the plan and the job -------------------------------------------------------------------------


def _recompute_changes(explanation: Explanation) -> Iterator[Change]:
    """Yield the layer that keeps most of a full stage, and the slowest that is recomputed."""
    pipeline, full = explanation.pipeline, set(explanation.memory.full)
    layers, job = pipeline.problem.graph.layers, pipeline.problem.job
    lean, rich = [], []
    for stage in pipeline.stages:
        spec = stage.spec
        freed = {*spec.recompute, *spec.offload}
        kept = [name for name in spec.layers if name not in freed]
        if job.recompute and full & set(spec.devices) and kept:
            lean.append(max(kept, key=lambda name: layers[name].stash_bytes))
        if spec.recompute:
            rich.append(max(spec.recompute, key=lambda name: layers[name].forward_flops))
    yield from (StashChange(layer, "recompute") for layer in lean[:MOST])
    yield from (StashChange(layer, "keep") for layer in rich[:MOST])


def _microbatch_changes(problem: Problem) -> Iterator[Change]:
    """Yield twice as many of half the size, where times were not measured for this size."""
    job = problem.job
    fits = job.samples_per_microbatch % 2 == 0 and 2 * job.microbatches <= MAX_MICROBATCHES
    if fits and not has_measured_times(problem):
        yield MicrobatchChange(Fraction(2))


def _space_changes(problem: Problem) -> Iterator[Change]:
    """Yield each freedom taken away where the job gives it, or given where it does not."""
    for freedom, (field, without, _) in FREEDOMS.items():
        change = SpaceChange(freedom, allowed=getattr(problem.job, field) == without)
        if not change.is_possible(problem.job):
            continue
        if is_expressible(with_job(problem, **change.job_fields)):
            yield change
