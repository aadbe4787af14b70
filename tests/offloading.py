"""Stages that offload some of their stashes, drawn from stages that do not."""

from __future__ import annotations

import random
from dataclasses import replace

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place
from planner.plan.problem import Problem
from planner.variants.problems import with_job

RATES = (0.01, 0.1, 1.0, 10.0, 100.0)
"""GB/s of host links: from far slower to far quicker than operations."""


def with_host_links(problem: Problem, rng: random.Random, **job: object) -> Problem:
    """Return a problem whose device types all have a host link and whose job allows to use it."""
    types = {
        name: kind.model_copy(update={"host_link_gb_per_s": rng.choice(RATES)})
        for name, kind in problem.cluster.device_types.items()
    }
    cluster = problem.cluster.model_copy(update={"device_types": types})
    return with_job(replace(problem, cluster=cluster), **{"offload": True, **job})


def offloading(pipeline: PlacedPipeline, rng: random.Random, share: float) -> PlacedPipeline:
    """Return the same stages with a share of the layers that they do not recompute offloaded."""
    problem = with_host_links(pipeline.problem, rng)
    specs = [
        replace(
            stage.spec,
            offload=tuple(
                name
                for name in stage.spec.layers
                if name not in stage.spec.recompute and rng.random() < share
            ),
        )
        for stage in pipeline.stages
    ]
    return place(problem, specs, pipeline.sync)
