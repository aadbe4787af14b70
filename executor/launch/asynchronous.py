"""What an asynchronous pipeline needs of a plan, and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from executor.launch.config import CheckpointTable, TrainingConfig
from executor.launch.run import RunSettings
from executor.sync.shared_parameters import users_of_parameters
from planner.cluster.hardware import GIB
from planner.costs.placement import place_plan
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.sync.strategies import SYNCHRONOUS

_OTHERWISE = "use --pipelining flush"


def require_asynchronous(plan: Plan, config: TrainingConfig, run: RunSettings) -> None:
    """Refuse what a pipeline that does not flush cannot have.

    Raises:
        PipeplanError: naming each field, its value and the remedy.
    """
    problems = [*_of_stages(plan), *_of_training(plan, config, run)]
    # Memory is told of plans that could run.
    problems = problems or list(_of_memory(plan))
    if problems:
        raise PipeplanError([f"--pipelining async: {problem}" for problem in problems])


def _of_stages(plan: Plan) -> Iterator[str]:
    if plan.tensor_parallel is not None:
        yield (
            f"tensor_parallel: groups of {max(plan.degrees)}; their members would step one after "
            f"the other; plan without tensor parallelism, or {_OTHERWISE}"
        )
    for stage in plan.stages:
        if len(stage.devices) > 1:
            yield (
                f"stages: stage {stage.index} has {len(stage.devices)} replicas, whose gradients "
                "are summed at a flush; plan with replication = false, or "
                f"{_OTHERWISE}"
            )
    held = [device for stage in plan.stages for device in stage.devices]
    for device in sorted({device for device in held if held.count(device) > 1}):
        yield (
            f"stages: {device} has {held.count(device)} of them, but staleness is that of one "
            f"stage a device; plan with max_stages_per_device = 1, or {_OTHERWISE}"
        )
    for stage in plan.stages:
        if stage.offload:
            yield (
                f"stages: stage {stage.index} offloads stashes, whose copies belong to the order "
                f"of a pipeline that flushes; plan with offload = false, or {_OTHERWISE}"
            )
    if any(operation.kind == "W" for order in plan.parsed_orders().values() for operation in order):
        yield (
            "orders: they split backwards, but a microbatch's update needs its weight gradients "
            f"at once; plan with backward = 'whole', or {_OTHERWISE}"
        )
    for name, stages in users_of_parameters(plan).items():
        if len(stages) > 1:
            yield (
                f"model: stages {' and '.join(map(str, stages))} share {name}, which would have "
                "another staleness in each; plan with these layers in one stage or untie them, or "
                f"{_OTHERWISE}"
            )


def _of_training(plan: Plan, config: TrainingConfig, run: RunSettings) -> Iterator[str]:
    if plan.job.lengths is not None:
        yield (
            "job.lengths: microbatches of several lengths, whose gradients have weights in a step; "
            f"plan with one length, or {_OTHERWISE}"
        )
    if plan.sync.strategy not in SYNCHRONOUS:
        yield (
            f"sync.strategy: {plan.sync.strategy!r} is of pipelines side by side, which flush; "
            f"train one pipeline, or {_OTHERWISE}"
        )
    if plan.job.precision == "float16":
        yield (
            "job.precision: float16 needs a loss scale that all stages change at once; plan with "
            f"bfloat16 or float32, or {_OTHERWISE}"
        )
    if config.clip_norm is not None:
        yield (
            f"clip_norm: {config.clip_norm:g} is of the norm over all stages, which step at "
            f"different times; leave it out, or {_OTHERWISE}"
        )
    if config.loss_mean == "tokens":
        yield f"loss_mean: tokens; a step of the optimizer has one microbatch; {_OTHERWISE}"
    if config.validation is not None:
        yield f"validation: stages have weights of different steps; leave it out, or {_OTHERWISE}"
    if config.timeline is not None:
        yield (
            f"timeline: {config.timeline}; steps overlap, so that no step has a timeline of its "
            f"own; leave it out, or {_OTHERWISE}"
        )
    if run.sync_trace is not None:
        yield f"sync-trace: {run.sync_trace}; nothing is synchronised; leave it out"


def _of_memory(plan: Plan) -> Iterator[str]:
    """Count a version of the weights, and a stash, for each microbatch in flight."""
    pipeline = place_plan(plan)
    for stage, extra_bytes in zip(plan.stages, version_bytes(plan), strict=True):
        device, placed = stage.devices[0], pipeline.stages[stage.index]
        in_flight = len(plan.stages) - stage.index
        needed = pipeline.static_bytes(device) + placed.tight_bytes() + extra_bytes
        needed += in_flight * placed.stash_bytes
        capacity = pipeline.capacity_bytes(device)
        if needed > capacity:
            yield (
                f"stages: stage {stage.index} needs {needed / GIB:.3g} GiB on {device} with "
                f"{in_flight} microbatches in flight, {extra_bytes / GIB:.3g} GiB of them for "
                f"stashed weights, and there are {capacity / GIB:.3g}; plan more stages or smaller "
                f"microbatches, or {_OTHERWISE}"
            )


def version_bytes(plan: Plan) -> list[int]:
    """Return by stage the bytes of stashed weights: one version a later stage."""
    size = {p.name: p.bytes for p in plan.model.graph.parameters if p.trainable}
    used = {layer.name: layer.parameters for layer in plan.model.graph.layers}
    rows = []
    for stage in plan.stages:
        names = {name for layer in stage.layers for name in used[layer] if name in size}
        later = len(plan.stages) - 1 - stage.index
        rows.append(later * sum(size[name] for name in names))
    return rows


def stretches(
    first: int, steps: int, table: CheckpointTable | None
) -> Callable[[int], tuple[int, int]]:
    """Return a function from a step to the first and last step of its stretch.

    The pipeline is emptied where a checkpoint is written, and at the end.

    Args:
        first: step of this training.
        steps: of the whole training.
        table: of the training file, if checkpoints are written.
    """
    every = steps if table is None else table.every

    def stretch(step: int) -> tuple[int, int]:
        begins = max(first, (step - 1) // every * every + 1)
        return begins, min(steps, -(-step // every) * every)

    return stretch
