"""Features of a job that not everything takes yet, refused by name where one is not taken."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Literal, get_args

from planner.errors import PipeplanError
from planner.job import Job

Feature = Literal[
    "tensor_parallel",
    "shard_optimizer",
    "shard_parameters",
    "offload",
    "recompute_attention",
    "expert_parallel",
    "lengths",
]
FEATURES: tuple[Feature, ...] = get_args(Feature)
"""Fields of a job without which a plan is one that everything takes."""


def require_without(
    job: Job,
    what: str,
    features: Collection[Feature] = FEATURES,
    *,
    degree: int | None = None,
    instead: str = "",
) -> None:
    """Refuse a job with features that something does not take yet.

    Args:
        job: of a problem or of a plan.
        what: what does not take them, such as ``replan``.
        features: that it does not take.
        degree: devices of a tensor-parallel group of the plan, whose job may leave it open; None:
            what the job says counts.
        instead: what takes groups, as a remedy.

    Raises:
        PipeplanError: naming each field, its value and the remedy.
    """
    problems = list(_problems(job, what, features, degree, instead))
    if problems:
        raise PipeplanError(problems)


def _problems(
    job: Job, what: str, features: Collection[Feature], degree: int | None, instead: str
) -> Iterator[str]:
    groups = job.tensor_parallel if degree is None else degree
    if "tensor_parallel" in features and groups != 1:
        yield (
            f"tensor_parallel = {groups}: {what} supports single devices only so far; "
            f"{f'{instead}, or ' if instead else ''}use a plan, or a job, with tensor_parallel = 1"
        )
    if "shard_optimizer" in features and job.shard_optimizer:
        yield (
            f"shard_optimizer = {json.dumps(job.shard_optimizer)}: {what} supports optimizer state "
            "that is whole on every replica only so far; use a plan, or a job, with "
            "shard_optimizer = false"
        )
    if "shard_parameters" in features and job.shard_parameters:
        yield (
            f"shard_parameters = {json.dumps(job.shard_parameters)}: {what} supports weights and "
            "gradients that are whole on every replica only so far; use a plan, or a job, with "
            "shard_parameters = false"
        )
    if "offload" in features and job.offload:
        yield (
            f"offload = {json.dumps(job.offload)}: {what} supports stashes that stay on their "
            "devices only so far; use a plan, or a job, with offload = false"
        )
    if "recompute_attention" in features and job.recompute_attention:
        yield (
            f"recompute_attention = true: {what} supports attention that keeps what its backward "
            "needs, or layers recomputed whole, only so far; use a plan, or a job, with "
            "recompute_attention = false"
        )
    if "expert_parallel" in features and job.expert_parallel:
        yield (
            f"expert_parallel = true: {what} supports experts of which every device of a group has "
            "a share only so far; use a plan, or a job, with expert_parallel = false"
        )
    if "lengths" in features and job.lengths is not None:
        yield (
            f"lengths: microbatches of {len(job.lengths.tokens)} lengths, but {what} supports one "
            "length only so far; use a plan, or a job, without lengths"
        )


def require_decided(job: Job, what: str) -> None:
    """Refuse to leave it open whether replicas share what they hold, or stashes offload.

    Args:
        job: of a problem.
        what: what needs to know, such as ``compare``.

    Raises:
        PipeplanError: if the job leaves it open.
    """
    for name in ("shard_optimizer", "shard_parameters", "offload"):
        if getattr(job, name) == "if_needed":
            raise PipeplanError(
                f'{name} = "if_needed": {what} does not decide that; set it to true or false'
            )
