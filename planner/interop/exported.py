"""Plans as files of other tools: what an export returns, and what the exports have in common."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner.costs.placement import place_plan
from planner.errors import PipeplanError
from planner.model.blocks import LOSS, block_name
from planner.model.graph_record import Boundary
from planner.model.group_graph import split_of
from planner.plan.operations import Orders
from planner.plan.plan import Plan, Stage, Sync
from planner.plan.unsupported import FEATURES, Feature, require_without
from planner.prediction import replay
from planner.simulation.timeline import Timeline
from planner.sync.pipeline_replicas import PipelineReplica, pipeline_replicas_of
from planner.units import and_more, format_bytes, format_seconds

FOLDER = "FOLDER"
"""Stands in lines of use for the folder that the files are written into."""
FORMAT = "pipeplan-stages/1"
TARGETS = {
    "torch-csv": "planner.interop.torch_pipelining",
    "torchtitan": "planner.interop.torchtitan",
    "megatron": "planner.interop.megatron",
    "deepspeed": "planner.interop.deepspeed",
}
"""Modules with a function ``export(plan) -> Exported``."""
TAKES: Mapping[str, tuple[Feature, ...]] = {
    "torch-csv": ("tensor_parallel",),
    "torchtitan": ("tensor_parallel", "shard_optimizer", "shard_parameters"),
    "megatron": ("tensor_parallel", "shard_optimizer", "recompute_attention"),
    "deepspeed": ("tensor_parallel", "shard_optimizer"),
}
"""Features of jobs that a target runs."""
StageDevices = tuple[str, ...]
"""The device of every stage, of one pipeline."""


@dataclass(frozen=True)
class Exported:
    """A plan as files of another tool.

    Attributes:
        files: contents by name, to be written into one folder.
        use: how to run it there, lines for the user; ``FOLDER`` stands for the files' folder, also
            as the Python literal ``"FOLDER"``.
        notes: what of the plan the target does not carry or does otherwise, one line each, with
            its cost as far as it can be predicted.
    """

    files: Mapping[str, str]
    use: tuple[str, ...]
    notes: tuple[str, ...]

    def use_in(self, folder: Path) -> tuple[str, ...]:
        """Return the lines of use for files in a folder, valid from any working directory.

        Args:
            folder: that holds the files; its absolute path is written.
        """
        path = str(folder.absolute())
        forms = {FOLDER: shlex.quote(path), f'"{FOLDER}"': json.dumps(path, ensure_ascii=False)}
        return tuple(
            re.sub(f'"{FOLDER}"|{FOLDER}', lambda found: forms[found[0]], row) for row in self.use
        )


def export_plan(plan: Plan, target: str) -> Exported:
    """Return a plan as files of another tool.

    Args:
        plan: verified.
        target: a name of :data:`TARGETS`.

    Raises:
        PipeplanError: if there is no such target, or it cannot express the plan: every reason.
    """
    if target not in TARGETS:
        raise PipeplanError(f"--to {target}: no such target; choose from {', '.join(TARGETS)}")
    features = [feature for feature in FEATURES if feature not in TAKES[target]]
    require_without(plan.job, f"export --to {target}", features, degree=plan.degree)
    exported: Exported = import_module(TARGETS[target]).export(plan)
    return exported


def stage_table(plan: Plan, ranks: Sequence[str], **fields: Any) -> str:
    """Return ``stages.json``: each stage's layers, ranks, and tensors received and sent.

    Args:
        plan: any.
        ranks: the device of rank 0, rank 1, ….
        fields: more of the file, under names of their own.
    """
    rank_of = {device: rank for rank, device in enumerate(ranks)}
    sent = [
        [{"name": row.name, "shape": list(row.shape), "dtype": row.dtype} for row in tensors]
        for tensors in crossing(plan)
    ]
    data = {
        "format": FORMAT,
        "model": plan.model.name,
        "ranks": list(ranks),
        "microbatches": plan.microbatches,
        "samples_per_microbatch": plan.job.samples_per_microbatch,
        **({} if plan.degree == 1 else {"tensor_parallel": plan.degree}),
        **fields,
        "stages": [
            _row(plan, stage, rank_of) | {"receives": receives, "sends": sends}
            for stage, receives, sends in zip(plan.stages, [[], *sent], [*sent, []], strict=True)
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def _row(plan: Plan, stage: Stage, rank_of: Mapping[str, int]) -> dict[str, Any]:
    held = set(stage.layers)
    devices = [device for name in stage.devices for device in plan.members(name)]
    used = [name for row in plan.model.graph.layers if row.name in held for name in row.parameters]
    return {
        "stage": stage.index,
        "ranks": [rank_of[device] for device in devices],
        "devices": devices,
        "layers": list(stage.layers),
        "parameters": list(dict.fromkeys(used)),
        "recompute": list(stage.recompute),
    }


def ranks_of(plan: Plan, by_pipeline: Sequence[StageDevices]) -> list[str]:
    """Return the device of every rank: members of a group first, then pipelines, then stages.

    Args:
        plan: any.
        by_pipeline: the device or group of every rank of a pipeline, or of every stage.
    """
    places = zip(*(dict.fromkeys(devices) for devices in by_pipeline), strict=True)
    return [device for place in places for name in place for device in plan.members(name)]


def devices_by_stage(plan: Plan, replicas: Sequence[PipelineReplica]) -> tuple[StageDevices, ...]:
    """Return the device of every stage, for each pipeline."""
    return tuple(
        tuple(next(d for d in stage.devices if d in replica.devices) for stage in plan.stages)
        for replica in replicas
    )


def devices_by_replica(plan: Plan) -> tuple[StageDevices, ...]:
    """Return the device of every stage, for the i-th replicas of all stages.

    They are the plan's own pipelines where it has some.

    Raises:
        PipeplanError: if stages have different numbers of replicas.
    """
    counts = {len(stage.devices) for stage in plan.stages}
    if len(counts) > 1:
        rows = ", ".join(f"{stage.index}: {len(stage.devices)}" for stage in plan.stages)
        raise PipeplanError(
            f"stages: they have different numbers of replicas ({rows}), but data parallelism has "
            "as many of each; plan again with `--sync semi_decentralized`, which makes whole "
            "pipelines, or with replication = false in the job"
        )
    try:
        return devices_by_stage(plan, pipeline_replicas_of(plan))
    except PipeplanError:  # Microbatches change from one pipeline to another.
        return tuple(zip(*(stage.devices for stage in plan.stages), strict=True))


# --- what crosses cuts ----------------------------------------------------------------------------


def stage_of_layer(plan: Plan) -> dict[str, int]:
    """Return the stage of every layer."""
    return {layer: stage.index for stage in plan.stages for layer in stage.layers}


def spans(plan: Plan) -> list[tuple[Boundary, int, int]]:
    """Return each tensor with the stage that makes it and the last stage that uses it."""
    stage_of = stage_of_layer(plan)
    return [
        (tensor, stage_of[tensor.producer], max(stage_of[user] for user in tensor.users))
        for tensor in plan.model.graph.boundaries
    ]


def crossing(plan: Plan) -> list[list[Boundary]]:
    """Return for each cut the tensors that are made before it and used after it."""
    rows = spans(plan)
    return [
        [tensor for tensor, first, last in rows if first <= cut < last]
        for cut in range(len(plan.stages) - 1)
    ]


def tied_across_stages(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return parameters that layers of several stages use, by FQN, with these stages."""
    stages: dict[str, set[int]] = {}
    stage_of = stage_of_layer(plan)
    trainable = {row.name for row in plan.model.graph.parameters if row.trainable}
    for layer in plan.model.graph.layers:
        for name in trainable.intersection(layer.parameters):
            stages.setdefault(name, set()).add(stage_of[layer.name])
    return {name: tuple(sorted(found)) for name, found in stages.items() if len(found) > 1}


# --- what several tools refuse --------------------------------------------------------------------


def loss_problems(plan: Plan, tool: str) -> Iterator[str]:
    """Yield a line if the loss layer is not in the last stage together with another layer."""
    stage, last = stage_of_layer(plan).get(LOSS), len(plan.stages) - 1
    if stage not in (None, last):
        yield (
            f"stages[{stage}].layers: the layer {LOSS!r} is in stage {stage}, but {tool} computes "
            f"the loss in the last stage, {last}; move it there"
        )
    elif plan.stages[last].layers == (LOSS,):
        yield (
            f"stages[{last}].layers: the last stage holds only the layer {LOSS!r}, which is no "
            f"module: {tool} computes it after the last one; move a layer to it, or merge it with "
            "the stage before"
        )


def last_forward_problems(orders: Orders, last: int, tool: str) -> Iterator[str]:
    """Yield a line if a forward of the last stage follows one of a later microbatch.

    torch keeps the losses in the order in which they are made, and takes microbatch m's to be the
    m-th (``_PipelineSchedule._maybe_get_loss``, torch 2.13): other orders fail or, worse, train on
    wrong gradients.

    Args:
        orders: of one pipeline, by device.
        last: the last stage.
        tool: as the line names it.
    """
    for device, order in orders.items():
        forwards = [row.microbatch for row in order if row.stage == last and row.kind == "F"]
        for before, after in pairwise(forwards):
            if after < before:
                yield (
                    f"orders[{device!r}]: {last}F{after} comes after {last}F{before}, but {tool} "
                    "takes the losses to be in the order of microbatches; number the "
                    "microbatches in the order of the last stage's forwards"
                )
                return


def precision_problems(plan: Plan, tool: str, types: Sequence[str], words: str) -> Iterator[str]:
    """Yield a line on a precision in which a tool does not train.

    Args:
        plan: any.
        tool: as the line names it.
        types: in which it trains.
        words: these types in the line.
    """
    if plan.job.precision not in types:
        yield (
            f"job.precision: {plan.job.precision!r}, but {tool} trains in {words}; plan again "
            "with one of these"
        )


def split_problems(plan: Plan, tool: str) -> Iterator[str]:
    """Yield blocks of which a tensor-parallel group holds a part whole, where a tool splits all.

    Args:
        plan: verified.
        tool: as the line names it.
    """
    found = dict(_indivisible(plan, in_blocks=True))
    if found:
        name, reason = next(iter(found.items()))
        yield (
            f"tensor_parallel: every device of a group holds {name!r} whole"
            f"{and_more(len(found) - 1, 'parameter')} ({reason}), but {tool} splits all heads and "
            "columns of a block; plan with a tensor_parallel that divides them"
        )


# --- what several tools do otherwise --------------------------------------------------------------


def split_notes(plan: Plan, how: str) -> Iterator[str]:
    """Yield a line on what a group holds whole outside the blocks, such as the vocabulary.

    Args:
        plan: verified.
        how: what the tool does with it.
    """
    names = [name for name, _ in _indivisible(plan, in_blocks=False)]
    if names:
        yield (
            f"tensor_parallel: the plan counts {', '.join(map(repr, names))} whole on every device "
            f"of a group, since {plan.degree} does not divide it; {how}"
        )


def _indivisible(plan: Plan, *, in_blocks: bool) -> Iterator[tuple[str, str]]:
    """Yield the parameters that another degree would split, in numbered blocks or outside."""
    parallel = plan.tensor_parallel
    if parallel is None:
        return
    split = split_of(plan.model.graph, plan.degree, sequence=parallel.sequence)
    for layer in split.layers:
        if (block_name(layer.name) is not None) == in_blocks:
            yield from layer.indivisible.items()


def against(seconds: float, plan: Plan) -> str:
    """Return how a predicted time compares with the plan's, such as ``2 s predicted instead of …``.

    Args:
        seconds: an iteration's.
        plan: with its own prediction.
    """
    planned_s = plan.predicted.iteration_time_s
    change = f" ({seconds / planned_s - 1:+.1%})" if planned_s > 0 else ""
    return f"{format_seconds(seconds)} predicted instead of {format_seconds(planned_s)}{change}"


def overfull(timeline: Timeline) -> list[str]:
    """Return a phrase for each device that needs more memory than it has."""
    return [
        f"{device} needs {format_bytes(timeline.peak_memory_bytes[device])} of "
        f"{format_bytes(timeline.pipeline.capacity_bytes(device))}"
        for device in timeline.overflow_bytes
    ]


def recompute_notes(plan: Plan, remedy: str) -> Iterator[str]:
    """Yield a line on the plan's recomputation, and the cost of none and of full recomputation.

    Args:
        plan: whose orders stay as they are.
        remedy: how the tool recomputes.
    """
    recomputed = sum(len(stage.recompute) for stage in plan.stages)
    if not recomputed:
        return

    def replayed(choose: Callable[[Stage], tuple[str, ...]]) -> Timeline:
        rows = [row.model_copy(update={"recompute": choose(row)}) for row in plan.stages]
        return replay(plan.model_copy(update={"stages": tuple(rows)}))

    kept = replayed(lambda stage: ())
    every = replayed(lambda stage: tuple(name for name in stage.layers if name != LOSS))
    without = f"everything fits and takes {against(kept.iteration_time_s, plan)}"
    if full := overfull(kept):
        without = full[0] + (f", and {len(full) - 1} more overflow" if full[1:] else "")
    yield (
        f"recompute: {recomputed} of {len(plan.model.graph.layers)} layers are recomputed in the "
        f"plan; the export does not include that, so enable it yourself ({remedy}).  Without "
        f"recomputation {without}; with every layer recomputed "
        f"{against(every.iteration_time_s, plan)}"
    )


def receive_buffer_notes(plan: Plan, microbatches: int) -> Iterator[str]:
    """Yield a line on torch's receive buffers for activations and gradients.

    It makes one for every microbatch before the first step and keeps them
    (``PipelineStage._setup_forward_recv_info``, torch 2.13).

    Args:
        plan: any.
        microbatches: of each pipeline.
    """
    placed = place_plan(plan)
    extra_bytes = {
        device: microbatches
        * sum(placed.stages[s].input_bytes + placed.stages[s].output_gradient_bytes for s in stages)
        for device, stages in placed.stages_on.items()
    }
    device = max(extra_bytes, key=lambda name: extra_bytes[name])
    if not extra_bytes[device]:
        return
    full = [
        name
        for name, extra in extra_bytes.items()
        if plan.predicted.devices[name].peak_memory_bytes + extra > placed.capacity_bytes(name)
    ]
    effect = f"{', '.join(full)} may run out of memory" if full else "all still fits"
    yield (
        "torch allocates receive buffers for the activations and gradients of every microbatch: up "
        f"to {format_bytes(extra_bytes[device])} more than planned, on {device}; {effect}"
    )


def reduction_notes(plan: Plan, how: str) -> Iterator[str]:
    """Yield a line on a tool that reduces gradients later than the plan, if that takes longer.

    Args:
        plan: verified.
        how: what the tool does.
    """
    if not plan.overlaps:
        return
    options = {**plan.sync.options, "overlap": False}
    later = replay(plan.model_copy(update={"sync": Sync(options=options)}))
    if later.iteration_time_s > plan.predicted.iteration_time_s * (1 + 1e-9):
        yield (
            f"gradients: {how}, where the plan reduces buckets while they run: "
            f"{against(later.iteration_time_s, plan)}"
        )


def sync_notes(plan: Plan, tool: str) -> Iterator[str]:
    """Yield a line on a strategy of synchronisation that a tool does not have."""
    if len(plan.stages[0].devices) > 1 and plan.sync.strategy != "all_reduce":
        yield f"sync: {plan.sync.strategy!r} is not exported; {tool} averages gradients every step"


def order_notes(tool: str, name: str, plan: Plan, theirs: Timeline) -> Iterator[str]:
    """Yield a line on how a tool's order compares, unless the time is the same.

    Args:
        tool: that has one order only.
        name: of that order.
        plan: verified.
        theirs: its stages simulated in that order.
    """
    ours = replay(plan)
    before_s, after_s = ours.iteration_time_s, theirs.iteration_time_s
    if _orders(ours) == _orders(theirs) and abs(after_s - before_s) <= 1e-9 * before_s:
        yield f"{tool} runs the plan's own order, {name}"
    elif format_seconds(after_s) != format_seconds(before_s):
        yield f"{tool} runs {name} instead of the planned order: {against(after_s, plan)}"


def _orders(timeline: Timeline) -> set[tuple[str, tuple[Any, ...]]]:
    """Return the operations that ran on each device, in order."""
    found: dict[str, list[Any]] = {}
    for event in timeline.operations:
        found.setdefault(event.device, []).append(event.operation)
    return {(device, tuple(row)) for device, row in found.items()}
