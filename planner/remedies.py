"""What would make a problem fit into memory; each remedy is tried out before it is named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.artifacts.hardware import GIB
from planner.artifacts.problem import Problem
from planner.costs.microbatch_size import in_proportion
from planner.partition.chain import Chain
from planner.partition.memory.tight_division import TightDivision
from planner.units import plural

OPTIMIZERS = ("adamw", "sgd_momentum", "sgd")
"""From the most state to none."""


def remedies(chain: Chain, division: TightDivision, slack_bytes: float) -> list[str]:
    """Changes, each with its figure, that make every stage fit with one microbatch in flight.

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
    """Whether some division of the layers fits, one microbatch in flight."""
    return TightDivision(Chain(problem)).divide() is not None


def _job_changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Single settings of the job that need less memory."""
    job = problem.job
    if not job.recompute:
        yield "recompute = true", _with_job(problem, recompute=True)
    if job.max_stages is not None:
        unlimited = _with_job(problem, max_stages=None)
        stages = TightDivision(Chain(unlimited)).divide()
        if stages is not None:
            yield f"max_stages = {len(stages)}", _with_job(problem, max_stages=len(stages))
    yield from _lighter_optimizer(problem)
    yield from _smaller_microbatch(problem)


def _lighter_optimizer(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The heaviest that fits; else the lightest, for what it gives together with others."""
    lighter = OPTIMIZERS[OPTIMIZERS.index(problem.job.optimizer) + 1 :]
    changes = [(f'optimizer = "{name}"', _with_job(problem, optimizer=name)) for name in lighter]
    yield from _first_that_fits(changes)


def _smaller_microbatch(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The largest power of two less that fits, if all a layer keeps shrinks in proportion."""
    samples, changes = problem.job.samples_per_microbatch, []
    while samples > 1:
        samples //= 2
        text = f"samples_per_microbatch = {samples} (trace the model again)"
        changes.append((text, _with_samples(problem, samples)))
    yield from _first_that_fits(changes)


def _first_that_fits(changes: list[tuple[str, Problem]]) -> list[tuple[str, Problem]]:
    return next(([change] for change in changes if fits(change[1])), changes[-1:])


def _together(problem: Problem) -> list[str]:
    """As many settings of the job at once as it takes."""
    texts: list[str] = []
    while True:
        step = next((c for c in _job_changes(problem) if c[0] not in texts), None)
        if step is None:
            return []
        text, problem = step
        texts.append(text)
        if fits(problem):
            return [" with ".join(texts)]


def _with_job(problem: Problem, **settings: Any) -> Problem:
    return replace(problem, job=problem.job.model_copy(update=settings))


def _with_samples(problem: Problem, samples: int) -> Problem:
    """The problem with all activations in proportion to the samples of a microbatch."""
    job = problem.job.model_copy(update={"samples_per_microbatch": samples})
    return replace(problem, graph=in_proportion(problem.graph, samples), job=job)


def _more_devices(chain: Chain, division: TightDivision) -> list[str]:
    """The fewest more of the roomiest type, if any number helps."""
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
    """On the roomiest type alone, or on every device.

    The table of needs leaves out what several layers share; a little more is tried for that.
    """
    kind, problem = _roomiest(chain), chain.problem
    kinds = problem.cluster.device_types
    most = float(max(division.division.need_bytes[i, i + 1] for i in range(chain.length)))
    lacking = max(slack_bytes, most - kinds[kind].capacity_bytes)
    for more in (1.0, 1.05, 1.2, 1.5):
        size = kinds[kind].memory_gib + more * lacking / GIB
        size = math.ceil(size * 100) / 100
        if fits(_with_memory(problem, {kind: size})):
            return [f"devices of type {kind!r} with memory_gib = {size:g}"]
        extra = math.ceil(more * slack_bytes / GIB * 100) / 100
        if fits(_with_memory(problem, {t: kinds[t].memory_gib + extra for t in kinds})):
            return [f"{extra:g} GiB more on every device"]
    return []


def _with_memory(problem: Problem, memory_gib: Mapping[str, float]) -> Problem:
    kinds = problem.cluster.device_types
    changed = {
        name: kinds[name].model_copy(update={"memory_gib": size})
        for name, size in memory_gib.items()
    }
    cluster = problem.cluster.model_copy(update={"device_types": {**kinds, **changed}})
    return replace(problem, cluster=cluster)


def _roomiest(chain: Chain) -> str:
    kinds = chain.problem.cluster.device_types
    return max(chain.types, key=lambda name: kinds[name].capacity_bytes)
