"""What any rank can refuse by itself, before the model is built."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from executor.launch.config import TrainingConfig
from executor.launch.rank_options import require_seconds
from executor.launch.run import RunSettings
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.unsupported import require_without
from planner.records.document import require_file_path
from planner.sync.pipeline_replicas import ONE_OF_SYNCHRONOUS
from planner.sync.strategies import OPTIONS, STALE, SYNCHRONOUS
from planner.units import listed

GROUP_STRATEGIES = ("all_reduce", "fused")
"""Strategies of synchronisation that ranks of tensor-parallel groups have."""


def require_possible(plan: Plan, run: RunSettings, config: TrainingConfig | None) -> None:
    """Refuse what cannot be run, or would have no effect.

    Makes the folder of checkpoints.

    Args:
        plan: with the strategy of synchronisation that it is run with.
        run: the options.
        config: the training file; None: the plan is emulated.

    Raises:
        PipeplanError: naming each field, its value and the remedy.
    """
    problems = [
        *_without_effect(plan, run),
        *_of_groups(plan, run, emulated=config is None),
        *([] if config is None else _of_training(plan, run, config)),
    ]
    if problems:
        raise PipeplanError(problems)
    _require_features(plan, run, emulated=config is None)
    require_seconds(run.timeout_s)
    if run.pace is not None:
        run.pace.require_ranks(len(plan.ranks))
    if config is not None:
        _require_writable(config)


def _without_effect(plan: Plan, run: RunSettings) -> Iterator[str]:
    """Yield options of parallel pipelines where all ranks run in step."""
    name = plan.sync.strategy
    if name not in SYNCHRONOUS:
        return
    between = ", ".join(other for other in OPTIONS if other not in SYNCHRONOUS)
    options = {"pipeline": run.pipeline, "coordinator": run.coordinator}
    given = [f"--{option} {value}" for option, value in options.items() if value is not None]
    if given:
        yield (
            f"{' '.join(given)}: {name} runs all pipelines in step, as one job that needs no "
            f"coordinator; leave it out and start torchrun --nproc-per-node {plan.world_size} -m "
            f"executor PLAN, or use --sync with one of {between}"
        )
    others = {
        "inject": run.inject or None,
        "group-timeout": run.group_timeout_s,
    }
    for option, value in others.items():
        if value is not None:
            yield (
                f"--{option} {value}: it has no effect with {name}, whose ranks run in step; leave "
                f"it out, or use --sync with one of {between}"
            )


def _of_groups(plan: Plan, run: RunSettings, *, emulated: bool) -> Iterator[str]:
    """Yield what ranks of tensor-parallel groups do not support."""
    if plan.tensor_parallel is None:
        return
    have = f"plans with tensor-parallel groups (of {listed(plan.degrees)} devices)"
    if plan.sync.strategy not in GROUP_STRATEGIES:
        yield (
            f"sync.strategy: {plan.sync.strategy!r} is not supported for {have}; use --sync with "
            f"one of {', '.join(GROUP_STRATEGIES)}"
        )
    given = {
        "--emulate": emulated or None,
        "--emulate-speed": None if emulated else run.pace,
        "--sync-trace": run.sync_trace,
    }
    for option, value in given.items():
        if value is not None:
            yield f"{option}: not supported for {have}; leave it out"


def _of_training(plan: Plan, run: RunSettings, config: TrainingConfig) -> Iterator[str]:
    """Yield fields of a training file that do not fit the plan."""
    precision, name = plan.job.precision, plan.sync.strategy
    if config.autocast is not None and precision != "float32":
        yield (
            f"autocast: {config.autocast!r}, but the plan's weights are in {precision}; plan with "
            'precision = "float32" to use it, or leave it out'
        )
    if config.loss_scale is not None and precision != "float16":
        yield (
            f"loss_scale: the plan trains in {precision}, where gradients need no scaling; "
            'plan with precision = "float16" to use it, or leave it out'
        )
    if config.loss_mean == "tokens" and plan.job.loss == "output":
        yield (
            'loss_mean: "tokens" needs targets, and the model returns its own loss (loss = '
            '"output"); let it return logits, and plan with loss = "cross_entropy"'
        )
    if config.loss_mean == "tokens" and name not in SYNCHRONOUS:
        yield (
            f'loss_mean: "tokens" with sync.strategy {name!r}, whose pipelines have no common '
            f"step; use {ONE_OF_SYNCHRONOUS}"
        )
    if config.validation is not None:
        yield from (f"validation: {problem}; leave it out" for problem in _no_validation(plan))
    # It might tell parameters by their shapes, and would get slices of them in one dimension.
    if plan.job.shards_state and (run.optimizer is not None or config.optimizer is not None):
        field = plan.job.sharing_field
        yield (
            f"optimizer: one of your own is not supported for plans with job.{field} = true, whose "
            "ranks step on slices of parameters; train with the job's optimizer, or plan with "
            f"{field} = false"
        )


def _no_validation(plan: Plan) -> Iterator[str]:
    if len(plan.degrees) > 1:
        yield "it is not supported for tensor-parallel groups of several sizes yet"
    if plan.job.lengths is not None:
        yield "it is not supported for microbatches of several lengths yet"
    if plan.sync.strategy not in SYNCHRONOUS or plan.sync.strategy in STALE:
        yield f"sync.strategy {plan.sync.strategy!r} has no weights of a step between two steps"


def _require_features(plan: Plan, run: RunSettings, *, emulated: bool) -> None:
    """Refuse features of a job that not every way to run a plan supports."""
    if emulated:
        require_without(plan.job, "--emulate", ["shard_parameters", "lengths"])
    elif run.pace is not None:
        require_without(plan.job, "--emulate-speed", ["shard_parameters", "lengths"])
    if plan.sync.strategy not in SYNCHRONOUS:
        require_without(plan.job, f"sync.strategy = {plan.sync.strategy}", ["lengths"])
    if any(stage.offload for stage in plan.stages):
        require_without(plan.job, "training with offloaded stashes", ["recompute_attention"])


def _require_writable(config: TrainingConfig) -> None:
    """Make the folder of checkpoints, and refuse paths that could not be written in the end."""
    if config.timeline is not None:
        require_file_path(config.timeline)
    if config.checkpoint is None:
        return
    folder = Path(config.checkpoint.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipeplanError(
            f"checkpoint.folder: {folder} cannot be made: {error.strerror}; name a folder that can "
            "be written"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PipeplanError(
            f"checkpoint.folder: no permission to write in {folder}; name another folder"
        )
