"""What would make a plan fit: changes that were each tried out by a short search."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from planner.cluster.hardware import GIB
from planner.plan.problem import Problem
from planner.plan.runtimes import narrowed_by
from planner.search.microbatches import resized
from planner.search.needs import Needs
from planner.space import WITH_SHARDED_PARAMETERS, Space
from planner.units import format_seconds, plural
from planner.variants.problems import with_job, with_memory

OPTIMIZERS = ("adamw", "sgd_momentum", "sgd")
"""Optimizers from the most state to none."""
EXTRA = (1.0, 1.05, 1.2, 1.5)
"""Multiples of the memory that is missing by the least needs, to try in turn."""


class QuickPlan(NamedTuple):
    """The best plan of a short search: its time and its number of stages."""

    seconds: float
    stages: int


Quick = Callable[[Problem], QuickPlan | None]
"""A short search; None if it found no plan."""


def remedies(problem: Problem, needs: Needs, slack_bytes: float, quick: Quick) -> list[str]:
    """Return changes, each with its figure, with which a plan was found.

    Args:
        problem: that does not fit.
        needs: of its stages.
        slack_bytes: what every device lacks for some division to fit.
        quick: a short search.
    """

    def fits(changed: Problem) -> bool:
        return Needs(changed).divide() is not None and quick(changed) is not None

    found = [text for text, changed in _job_changes(problem, fits) if fits(changed)]
    if not found:
        found = _together(problem, fits)
    found += _more_devices(needs)
    return found + _more_memory(problem, needs, slack_bytes, fits)


Fits = Callable[[Problem], bool]


def _job_changes(problem: Problem, fits: Fits) -> Iterator[tuple[str, Problem]]:
    """Yield single settings of the job that need less memory."""
    job = problem.job
    if not job.recompute:
        yield "recompute = true", with_job(problem, recompute=True)
    if job.max_stages is not None:
        stages = Needs(with_job(problem, max_stages=None)).divide()
        if stages is not None:
            yield f"max_stages = {len(stages)}", with_job(problem, max_stages=len(stages))
    lighter = OPTIMIZERS[OPTIMIZERS.index(job.optimizer) + 1 :]
    changes = [(f'optimizer = "{name}"', with_job(problem, optimizer=name)) for name in lighter]
    yield from _first_that_fits(changes, fits)
    samples, changes = job.samples_per_microbatch, []
    while samples > 1:
        samples //= 2
        text = f"samples_per_microbatch = {samples} (trace the model again)"
        changes.append((text, resized(problem, samples)))
    yield from _first_that_fits(changes, fits)


def _first_that_fits(changes: list[tuple[str, Problem]], fits: Fits) -> list[tuple[str, Problem]]:
    """Return the smallest change that fits; else the largest, which may help with others."""
    return next(([change] for change in changes if fits(change[1])), changes[-1:])


def _together(problem: Problem, fits: Fits) -> list[str]:
    """Return as many settings of the job at once as it takes."""
    texts: list[str] = []
    while True:
        step = next((c for c in _job_changes(problem, fits) if c[0] not in texts), None)
        if step is None:
            return []
        text, problem = step
        texts.append(text)
        if fits(problem):
            return [" with ".join(texts)]


def _roomiest(needs: Needs) -> str:
    return max(needs.types, key=lambda name: needs.capacities[name])


def _more_devices(needs: Needs) -> list[str]:
    """Return the fewest more of the roomiest type, if any number helps."""
    kind, most = _roomiest(needs), len(needs.names)

    def fits(more: int) -> bool:
        return Needs(needs.problem, {kind: more}).divide() is not None

    least = bisect_left(range(most + 1), True, lo=1, key=fits)
    return [f"{plural(least, 'more device')} of type {kind!r}"] if least <= most else []


def _more_memory(problem: Problem, needs: Needs, slack_bytes: float, fits: Fits) -> list[str]:
    """Return more memory on the roomiest type alone, or on every device."""
    kind, kinds = _roomiest(needs), problem.cluster.device_types
    most = max(needs.need(a, b, kind) for a, b in pairwise(needs.places))
    lacking = max(slack_bytes, most - kinds[kind].capacity_bytes)
    for more in EXTRA:
        size = math.ceil((kinds[kind].memory_gib + more * lacking / GIB) * 100) / 100
        if fits(with_memory(problem, {kind: size})):
            return [f"devices of type {kind!r} with memory_gib = {size:g}"]
        extra = math.ceil(more * slack_bytes / GIB * 100) / 100
        if fits(with_memory(problem, {t: kinds[t].memory_gib + extra for t in kinds})):
            return [f"{extra:g} GiB more on every device"]
    return []


def missing_freedoms(problem: Problem, quick: Quick) -> Iterator[str]:
    """Yield each freedom that the job does not give and with which a plan was found, with its time.

    Args:
        problem: that does not fit.
        quick: a short search.
    """
    for fields in wider_spaces(problem.job.space):
        found = quick(with_job(problem, **fields))
        if found is not None:
            yield _words(problem, _needed(fields, found), found.seconds)


def wider_spaces(space: Space) -> Iterator[dict[str, Any]]:
    """Yield fields of a job with one freedom more each, of those that the space does not give."""
    everything = Space()
    # Groups of devices cannot divide what they split, whatever the job's cuts.
    cuts = ("cuts",) if space.tensor_parallel == 1 else ()
    for name in ("recompute", "max_stages", "min_stages", *cuts, "replication", "placement"):
        value = getattr(everything, name)
        if getattr(space, name) != value:
            yield {name: value}
    if space.replication and not space.shard_optimizer:
        yield {"shard_optimizer": True}
    is_divisible = space.replication and space.tensor_parallel == 1 and not space.offload
    if is_divisible and not space.shard_parameters:
        yield {"shard_parameters": True, **WITH_SHARDED_PARAMETERS}
    if space.has_pipelines and space.order == "any":
        yield {"equal_pipelines": False}
    if space.order == "1f1b":
        yield {"order": "any", "backward": "any"}
    elif space.backward != "any":
        yield {"backward": "any"}


def _needed(fields: dict[str, Any], found: QuickPlan) -> dict[str, Any]:
    """Return the least values of the fields that the plan needs."""
    if "max_stages" in fields:
        return {"max_stages": found.stages}
    if "order" in fields:
        return {"order": "any"}
    return fields


def _words(problem: Problem, fields: dict[str, Any], time_s: float) -> str:
    runtime = problem.job.runtime
    cannot = f", but {runtime} cannot run it" if {*fields} & narrowed_by(runtime) else ""
    needed = [
        (name, value) for name, value in fields.items() if getattr(problem.job, name) != value
    ]
    told = (f"{name} = {'any' if name == 'cuts' else json.dumps(v)}" for name, v in needed)
    return f"with {', '.join(told)} a plan of {format_seconds(time_s)} fits{cannot}"
