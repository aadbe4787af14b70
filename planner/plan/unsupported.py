"""Features of a job that not everything takes yet, refused by name where one is not taken."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
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
_SUPPORTED: Mapping[Feature, str] = {
    "tensor_parallel": "single devices",
    "shard_optimizer": "optimizer state that is whole on every replica",
    "shard_parameters": "weights and gradients that are whole on every replica",
    "offload": "stashes that stay on their devices",
    "recompute_attention": "attention that keeps what its backward needs, or layers recomputed "
    "whole,",
    "expert_parallel": "experts of which every device of a group has a share",
}
"""What takes a job without the field."""


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
    values = {name: getattr(job, name) for name in FEATURES if name in features}
    if degree is not None and "tensor_parallel" in features:
        values["tensor_parallel"] = degree
    problems = []
    for name, value in values.items():
        usual = 1 if name == "tensor_parallel" else False
        if name == "lengths" and value is not None:
            problems.append(
                f"lengths: microbatches of {len(value.tokens)} lengths, but {what} supports one "
                "length only so far; use a plan, or a job, without lengths"
            )
        elif name != "lengths" and value != usual:
            other = f"{instead}, or " if instead and name == "tensor_parallel" else ""
            problems.append(
                f"{name} = {json.dumps(value)}: {what} supports {_SUPPORTED[name]} only so far; "
                f"{other}use a plan, or a job, with {name} = {json.dumps(usual)}"
            )
    if problems:
        raise PipeplanError(problems)


def require_decided(job: Job, what: str) -> None:
    """Refuse to leave open whether replicas share what they hold, stashes offload, or a size.

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
    if job.microbatch_sizes:
        raise PipeplanError(
            f"microbatch_sizes = {list(job.microbatch_sizes)}: {what} does not choose one; set "
            "samples_per_microbatch and microbatches, and leave microbatch_sizes out"
        )
