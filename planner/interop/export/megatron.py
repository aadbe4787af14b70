"""Export to Megatron-LM: a pipeline layout and its flags, and the time of its own schedule.

Megatron-LM takes stages, not orders: it runs 1F1B, or interleaved 1F1B where a rank holds several
stages. Its ranks count data-parallel neighbours first, then pipeline ranks (its default order
``tp-cp-ep-dp-pp``, without context and expert parallelism here), and the devices of a
tensor-parallel group before both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.cluster.cluster import node_of
from planner.costs.gradients import sums_in_float32
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError, shorten
from planner.interop.export.exported import Exported, split_notes
from planner.interop.export.megatron_form import MegatronForm, megatron_form
from planner.interop.export.notes import order_notes, reduction_notes
from planner.interop.importing.megatron_layout import render_layout
from planner.model.blocks import BlockStack
from planner.plan.operations import compress_devices
from planner.plan.plan import Plan, Stage
from planner.schedules.pipelines import orders_of_pipelines
from planner.schedules.published import WHOLE
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.sync.strategies import SYNCHRONOUS
from planner.units import format_bytes, plural


def has_untied_head(plan: Plan, stack: BlockStack) -> bool:
    """Return whether the last projection and the embedding have weights but share none.

    The last projection is the last layer behind the blocks that has weights and multiplies. A model
    without one, or a graph that names no parameters, says nothing about it.

    Args:
        plan: whose graph names each layer's parameters.
        stack: its blocks.
    """
    layers = {layer.name: layer for layer in plan.model.graph.layers}
    after = [layers[name] for name in stack.after]
    heads = [layer for layer in after if layer.parameters and layer.forward_flops]
    embedding = {name for layer in stack.before for name in layers[layer].parameters}
    return bool(heads and embedding) and embedding.isdisjoint(
        name for layer in after for name in layer.parameters
    )


FULL = "--recompute-granularity full"
SELECTIVE = "--recompute-granularity selective"


@dataclass(frozen=True)
class RecomputedBlocks:
    """The blocks that Megatron-LM recomputes for a plan.

    Attributes:
        flags: that make it so.
        layers: of each stage, as Megatron recomputes them.
        notes: where that is not what the plan says.
    """

    flags: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def recomputed(plan: Plan, stack: BlockStack) -> RecomputedBlocks:
    """Return the fewest blocks per stage that cover the blocks that the plan recomputes.

    ``--recompute-method uniform`` recomputes all blocks, ``block`` the first N of every stage,
    virtual ones too. Neither knows embedding and head.

    Args:
        plan: whose stages hold whole blocks.
        stack: its blocks.

    Raises:
        PipeplanError: if it recomputes attention besides.
    """
    held = [blocks_in(stage, stack) for stage in plan.stages]
    again = [_touched(row, stage) for row, stage in zip(held, plan.stages, strict=True)]
    number = max(map(len, again))
    if plan.job.recompute_attention:
        if number:
            raise PipeplanError(
                "megatron: job.recompute_attention: true, and stages recompute whole blocks: "
                "--recompute-granularity is either selective or full; plan again with one of "
                "recompute_attention and recompute set to false"
            )
        return RecomputedBlocks(
            (SELECTIVE,), ((),) * len(held), tuple(_notes(plan, stack, [()] * len(held), 0))
        )
    layers = tuple(tuple(layer for block in row[:number] for layer in block) for row in held)
    return RecomputedBlocks(
        _recompute_flags(held, number), layers, tuple(_notes(plan, stack, layers, number))
    )


def blocks_in(stage: Stage, stack: BlockStack) -> list[tuple[str, ...]]:
    """Return the layers of each block of a stage."""
    held = set(stage.layers)
    return [block.layers for block in stack.blocks if held.issuperset(block.layers)]


def _touched(blocks: Sequence[tuple[str, ...]], stage: Stage) -> list[tuple[str, ...]]:
    """Return the blocks in which the plan recomputes a layer."""
    return [block for block in blocks if not set(stage.recompute).isdisjoint(block)]


def _recompute_flags(held: Sequence[Sequence[tuple[str, ...]]], number: int) -> tuple[str, ...]:
    if number == 0:
        return ()
    if all(len(row) <= number for row in held):
        return (FULL, "--recompute-method uniform", "--recompute-num-layers 1")
    return (FULL, "--recompute-method block", f"--recompute-num-layers {number}")


def _notes(
    plan: Plan, stack: BlockStack, layers: Sequence[tuple[str, ...]], number: int
) -> Iterator[str]:
    ends = {*stack.before, *stack.after}
    yield from outside_notes(plan, stack, "Megatron")
    same = all(
        set(stage.recompute) - ends == set(row)
        for stage, row in zip(plan.stages, layers, strict=True)
    )
    if not same:
        yield (
            f"Megatron recomputes the first {plural(number, 'block')} of every stage, where the "
            "plan chooses its layers one by one; the predicted time and memory count that"
        )


def outside_notes(plan: Plan, stack: BlockStack, tool: str) -> Iterator[str]:
    """Yield a note on embedding and head, if the plan recomputes any of them."""
    ends = {*stack.before, *stack.after}
    left_out = [name for stage in plan.stages for name in stage.recompute if name in ends]
    if left_out:
        yield f"{tool} recomputes blocks only: {', '.join(left_out)} keep what they need"


FILE = "megatron.sh"


def export(plan: Plan) -> Exported:
    """Return the layout of a plan's stages, with its flags.

    Args:
        plan: verified.

    Raises:
        PipeplanError: with every reason why Megatron-LM cannot run its stages.
    """
    form = megatron_form(plan)
    again = recomputed(plan, form.stack)
    theirs = run_by_megatron(plan, form, again.layers)
    notes = (
        *order_notes("Megatron", _order_name(form), plan, theirs),
        *again.notes,
        *_memory_notes(theirs, plan),
        *_sync_notes(plan),
        *node_notes(form),
        *split_notes(plan, "Megatron-LM pads the vocabulary to a multiple and splits it"),
    )
    lines = (
        *sizes(plan, form, f'--pipeline-model-parallel-layout "{render_layout(form.stages)}"'),
        *_data_parallel(plan, form),
        *_gradients(plan),
        *again.flags,
        *untied(plan, form),
    )
    script = script_of(plan, form, "Megatron-LM", lines)
    return Exported({FILE: script}, _use(plan, form), notes)


def script_of(plan: Plan, form: MegatronForm, tool: str, lines: Iterable[str]) -> str:
    """Return a script that defines an array of arguments, and tells the device of every rank.

    Args:
        plan: verified.
        form: it in the tool's terms.
        tool: as the script names it.
        lines: arguments, and comments on them.
    """
    flags = "".join(f"    {line}\n" for line in lines)
    ranks = "".join(
        f"#   rank {i}: {_in_a_comment(device)}\n" for i, device in enumerate(form.ranks)
    )
    return (
        f"# {shorten(plan.model.name)} on {shorten(plan.cluster.name)}, written by Pipeplan for "
        f"{tool}.\n"
        f"# Source this in the script that starts {tool} and add these arguments to its own:\n"
        '#   torchrun … pretrain_gpt.py "${PIPEPLAN_ARGS[@]}" …\n'
        "# The plan's devices, in Megatron's order of ranks (tp-cp-ep-dp-pp):\n"
        f"{ranks}"
        f"PIPEPLAN_ARGS=(\n{flags})\n"
    )


def _in_a_comment(name: str) -> str:
    """Return a name that cannot end the comment line."""
    return name if name.isprintable() else json.dumps(name)


def sizes(plan: Plan, form: MegatronForm, *stages: str) -> tuple[str, ...]:
    """Return the arguments of layers, degrees and batch.

    Args:
        plan: verified.
        form: it in Megatron-LM's terms.
        stages: arguments that say how blocks are dealt out to stages.
    """
    samples = plan.job.samples_per_microbatch
    return (
        f"--num-layers {len(form.stack.blocks)}",
        *_groups(plan),
        f"--pipeline-model-parallel-size {form.pipeline_size}",
        *stages,
        *([f"--mtp-num-layers {len(ahead)}"] if (ahead := form.stack.prediction) else []),
        f"--micro-batch-size {samples}",
        f"--global-batch-size {samples * plan.microbatches}",
    )


def _groups(plan: Plan) -> Iterator[str]:
    """Yield the flags of tensor-parallel groups, if stages have any as devices."""
    parallel = plan.tensor_parallel
    if parallel is not None:
        yield f"--tensor-model-parallel-size {parallel.degree}"
        if parallel.sequence:
            yield "--sequence-parallel"


def _data_parallel(plan: Plan, form: MegatronForm) -> Iterator[str]:
    """Yield how replicas reduce gradients and hold the optimizer's state."""
    if len(form.pipelines) > 1:
        yield from ["--use-distributed-optimizer"] if plan.job.shards_state else []
        yield from ["--overlap-grad-reduce"] if plan.overlaps else []


def _gradients(plan: Plan) -> Iterator[str]:
    """Yield the flag by which gradients of 16-bit weights are summed as planned."""
    if sums_in_float32(plan.job):
        yield "--accumulate-allreduce-grads-in-fp32"
    elif plan.job.precision == "bfloat16":
        yield "--grad-reduce-in-bf16"


def untied(plan: Plan, form: MegatronForm) -> tuple[str, ...]:
    """Return the flag, with its reason, for an untied head; Megatron-LM ties weights by default."""
    if not has_untied_head(plan, form.stack):
        return ()
    return (
        "# Output weights of the plan's model are not its embedding's; Megatron-LM would tie them.",
        "--untie-embeddings-and-output-weights",
    )


def ranks_in_words(plan: Plan, form: MegatronForm) -> str:
    """Return the number of ranks with degrees, such as ``8 ranks (tensor 2 x pipeline 4)``."""
    found = {"tensor": plan.degree, "pipeline": form.pipeline_size, "data": len(form.pipelines)}
    shown = " x ".join(f"{name} {n}" for name, n in found.items() if n > 1 or name == "pipeline")
    return f"{len(form.ranks)} ranks" + (f" ({shown})" if " x " in shown else "")


def _use(plan: Plan, form: MegatronForm) -> tuple[str, ...]:
    return (
        f"in the script that starts Megatron-LM on {ranks_in_words(plan, form)}: "
        f'source FOLDER/{FILE}, then add "${{PIPEPLAN_ARGS[@]}}" to its arguments',
        "model, sequence length, precision, optimizer and data remain your own arguments; remove "
        "other flags that divide the pipeline",
    )


def run_by_megatron(
    plan: Plan, form: MegatronForm, recompute: Sequence[tuple[str, ...]]
) -> Timeline:
    """Simulate the same stages in Megatron-LM's own order.

    Args:
        plan: verified.
        form: it in Megatron-LM's terms.
        recompute: layers of each stage that run again.
    """
    specs = [
        StageSpec(stage.layers, form.devices_of(stage.index), row)
        for stage, row in zip(plan.stages, recompute, strict=True)
    ]
    pipeline = place(plan.problem, specs)
    by_stage = [form.devices_of(stage.index) for stage in plan.stages]
    generator = WHOLE[_order_name(form).lower()]
    return simulate(
        pipeline,
        orders_of_pipelines(pipeline, list(zip(*by_stage, strict=True)), generator),
    )


def _order_name(form: MegatronForm) -> str:
    return "interleaved 1F1B" if form.is_interleaved else "1F1B"


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
            f"is not exported"
        )


def node_notes(form: MegatronForm) -> Iterator[str]:
    """Yield a note if ranks of one node are not consecutive, as torchrun numbers them."""
    nodes = [node for node, _ in groupby(form.ranks, node_of)]
    if len(set(nodes)) < len(nodes):
        yield (
            f"in Megatron-LM's order the ranks are on {compress_devices(form.ranks)}: they are not "
            f"grouped by node, so use a launcher that can place each rank (a rankfile, or one "
            f"torchrun per device)"
        )
