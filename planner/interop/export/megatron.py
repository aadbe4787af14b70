"""Export to Megatron-LM: a pipeline layout and its flags, and the time of its own schedule.

Megatron-LM takes stages, not orders: it runs 1F1B, or interleaved 1F1B where a rank holds several
stages. Its ranks count data-parallel neighbours first, then pipeline ranks (its default order
``tp-cp-ep-dp-pp``, without context and expert parallelism here), and the devices of a
tensor-parallel group before both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from planner.cluster.cluster import node_of
from planner.costs.gradients import sums_in_float32
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError, shorten
from planner.interop.division import render_layout
from planner.interop.export.exported import Exported, split_notes
from planner.interop.export.megatron_form import MegatronForm, megatron_form
from planner.interop.export.notes import order_notes, reduction_notes
from planner.model.blocks import BlockStack
from planner.plan.operations import compress_devices
from planner.plan.plan import Plan
from planner.schedules.pipelines import orders_of_pipelines
from planner.schedules.published import WHOLE
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.sync.strategies import SYNCHRONOUS
from planner.units import format_bytes, plural

FILE = "megatron.sh"
_SCRIPT = """\
# {model} on {cluster}, written by Pipeplan for Megatron-LM.
# Source this in the script that starts Megatron-LM and add these arguments to its own:
#   torchrun … pretrain_gpt.py "${{PIPEPLAN_ARGS[@]}}" …
# The plan's devices, in Megatron's order of ranks (tp-cp-ep-dp-pp):
{ranks}PIPEPLAN_ARGS=(
{flags})
"""
_UNTIED = (
    "# Output weights of the plan's model are not its embedding's; Megatron-LM would tie them.",
    "--untie-embeddings-and-output-weights",
)


def export(plan: Plan) -> Exported:
    """Return the layout of a plan's stages, with its flags.

    Args:
        plan: verified.

    Raises:
        PipeplanError: with every reason why Megatron-LM cannot run its stages.
    """
    form = megatron_form(plan)
    again = _recomputed(plan, form.stack)
    theirs = _run_by_megatron(plan, form, again.layers)
    notes = (
        *order_notes("Megatron", _order_name(form), plan, theirs),
        *again.notes,
        *_memory_notes(theirs, plan),
        *_sync_notes(plan),
        *_node_notes(form),
        *split_notes(plan, "Megatron-LM pads the vocabulary to a multiple and splits it"),
    )
    flags = [*_sizes(plan, form), *_precision(plan, form), *again.flags]
    flags += _UNTIED if _has_untied_head(plan, form.stack) else ()
    rows = (f"#   rank {i}: {_in_a_comment(name)}\n" for i, name in enumerate(form.ranks))
    script = _SCRIPT.format(
        model=shorten(plan.model.name),
        cluster=shorten(plan.cluster.name),
        ranks="".join(rows),
        flags="".join(f"    {flag}\n" for flag in flags),
    )
    return Exported({FILE: script}, _use(plan, form), notes)


def _sizes(plan: Plan, form: MegatronForm) -> Iterator[str]:
    """Yield the arguments of layers, degrees and batch."""
    samples, parallel = plan.job.samples_per_microbatch, plan.tensor_parallel
    yield f"--num-layers {len(form.stack.blocks)}"
    if parallel is not None:
        yield f"--tensor-model-parallel-size {parallel.degree}"
        yield from ["--sequence-parallel"] if parallel.sequence else []
    yield f"--pipeline-model-parallel-size {form.pipeline_size}"
    yield f'--pipeline-model-parallel-layout "{render_layout(form.stages)}"'
    if form.stack.prediction:
        yield f"--mtp-num-layers {len(form.stack.prediction)}"
    yield f"--micro-batch-size {samples}"
    yield f"--global-batch-size {samples * plan.microbatches}"


def _precision(plan: Plan, form: MegatronForm) -> Iterator[str]:
    """Yield how gradients are summed and reduced, and who holds the optimizer's state."""
    if len(form.pipelines) > 1:
        yield from ["--use-distributed-optimizer"] if plan.job.shards_state else []
        yield from ["--overlap-grad-reduce"] if plan.overlaps else []
    if sums_in_float32(plan.job):
        yield "--accumulate-allreduce-grads-in-fp32"
    elif plan.job.precision == "bfloat16":
        yield "--grad-reduce-in-bf16"


def _has_untied_head(plan: Plan, stack: BlockStack) -> bool:
    """Return whether the last projection and the embedding have weights but share none.

    Megatron-LM ties them by default. The last projection is the last layer behind the blocks that
    has weights and multiplies. A model without one, or a graph that names no parameters, says
    nothing about it.
    """
    layers = {layer.name: layer for layer in plan.model.graph.layers}
    after = [layers[name] for name in stack.after]
    has_head = any(layer.parameters and layer.forward_flops for layer in after)
    embedding = {name for layer in stack.before for name in layers[layer].parameters}
    held = (name for layer in after for name in layer.parameters)
    return bool(has_head and embedding) and embedding.isdisjoint(held)


def _in_a_comment(name: str) -> str:
    """Return a name that cannot end the comment line."""
    return name if name.isprintable() else json.dumps(name)


def _use(plan: Plan, form: MegatronForm) -> tuple[str, ...]:
    degrees = {"tensor": plan.degree, "data": len(form.pipelines)}
    several = {name: number for name, number in degrees.items() if number > 1}
    sizes = {**several, "pipeline": form.pipeline_size}
    order = [name for name in ("tensor", "pipeline", "data") if name in sizes]
    shown = f" ({' x '.join(f'{name} {sizes[name]}' for name in order)})" if several else ""
    return (
        f"in the script that starts Megatron-LM on {len(form.ranks)} ranks{shown}: "
        f'source FOLDER/{FILE}, then add "${{PIPEPLAN_ARGS[@]}}" to its arguments',
        "model, sequence length, precision, optimizer and data remain your own arguments; remove "
        "other flags that divide the pipeline",
    )


# --- recomputation --------------------------------------------------------------------------------


class _Recomputed(NamedTuple):
    """What Megatron-LM recomputes: flags, the layers of each stage, notes on other choices."""

    flags: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def _recomputed(plan: Plan, stack: BlockStack) -> _Recomputed:
    """Return the fewest blocks per stage that cover the blocks that the plan recomputes.

    ``--recompute-method uniform`` recomputes all blocks, ``block`` the first N of every stage,
    virtual ones too. Neither knows embedding and head.

    Raises:
        PipeplanError: if it recomputes attention besides.
    """
    again = [set(stage.recompute) for stage in plan.stages]
    held = [
        [block.layers for block in stack.blocks if set(stage.layers).issuperset(block.layers)]
        for stage in plan.stages
    ]
    touched = (
        sum(not names.isdisjoint(block) for block in row)
        for names, row in zip(again, held, strict=True)
    )
    number = max(touched)
    if number and plan.job.recompute_attention:
        raise PipeplanError(
            "megatron: job.recompute_attention: true, and stages recompute whole blocks: "
            "--recompute-granularity is either selective or full; plan again with one of "
            "recompute_attention and recompute set to false"
        )
    flags: tuple[str, ...] = ()
    if plan.job.recompute_attention:
        flags = ("--recompute-granularity selective",)
    elif number:
        is_all = all(len(row) <= number for row in held)
        method = "uniform" if is_all else "block"
        flags = (
            *("--recompute-granularity full", f"--recompute-method {method}"),
            f"--recompute-num-layers {1 if is_all else number}",
        )
    layers = tuple(tuple(layer for block in row[:number] for layer in block) for row in held)
    return _Recomputed(flags, layers, tuple(_recompute_notes(plan, stack, layers, number)))


def _recompute_notes(
    plan: Plan, stack: BlockStack, layers: Sequence[tuple[str, ...]], number: int
) -> Iterator[str]:
    ends = {*stack.before, *stack.after}
    left_out = [name for stage in plan.stages for name in stage.recompute if name in ends]
    if left_out:
        yield f"Megatron recomputes blocks only: {', '.join(left_out)} keep what they need"
    rows = zip(plan.stages, layers, strict=True)
    if any(set(stage.recompute) - ends != set(row) for stage, row in rows):
        yield (
            f"Megatron recomputes the first {plural(number, 'block')} of every stage, where the "
            "plan chooses its layers one by one; the predicted time and memory count that"
        )


# --- notes ----------------------------------------------------------------------------------------


def _run_by_megatron(
    plan: Plan, form: MegatronForm, recompute: Sequence[tuple[str, ...]]
) -> Timeline:
    """Simulate the same stages in Megatron-LM's own order, with other layers recomputed."""
    devices = [form.devices_of(stage.index) for stage in plan.stages]
    rows = zip(plan.stages, devices, recompute, strict=True)
    pipeline = place(plan.problem, [StageSpec(row[0].layers, *row[1:]) for row in rows])
    rule = WHOLE[_order_name(form).lower()]
    pipelines = list(zip(*devices, strict=True))
    return simulate(pipeline, orders_of_pipelines(pipeline, pipelines, rule))


def _order_name(form: MegatronForm) -> str:
    return "interleaved 1F1B" if len(form.stages) > form.pipeline_size else "1F1B"


def _memory_notes(theirs: Timeline, plan: Plan) -> Iterator[str]:
    sharded = ", or shard the optimizer (--use-distributed-optimizer)"
    for device in theirs.overflow_bytes:
        yield (
            f"Megatron's order holds {format_bytes(theirs.peak_memory_bytes[device])} on {device}, "
            f"which has {format_bytes(theirs.pipeline.capacity_bytes(device))}: expect it to run "
            "out of memory; recompute more or use smaller microbatches"
            f"{'' if plan.job.shards_state else sharded}"
        )


def _sync_notes(plan: Plan) -> Iterator[str]:
    yield from reduction_notes(
        plan,
        "with --overlap-grad-reduce Megatron-LM reduces buckets during the last backward on the "
        "first stage alone, on others all gradients after it",
    )
    if plan.sync.strategy not in SYNCHRONOUS:
        yield (
            f"Megatron-LM reduces gradients synchronously over all replicas; {plan.sync.strategy} "
            "is not exported"
        )


def _node_notes(form: MegatronForm) -> Iterator[str]:
    """Yield a note if ranks of one node are not consecutive, as torchrun numbers them."""
    nodes = [node for node, _ in groupby(form.ranks, node_of)]
    if len(set(nodes)) < len(nodes):
        yield (
            f"in Megatron-LM's order the ranks are on {compress_devices(form.ranks)}: they are not "
            "grouped by node, so use a launcher that can place each rank (a rankfile, or one "
            "torchrun per device)"
        )
