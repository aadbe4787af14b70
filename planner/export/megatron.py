"""Megatron-LM: a pipeline layout and its flags, and what its own schedule costs.

Megatron-LM takes stages, not orders: it runs 1F1B, or interleaved 1F1B where a rank holds several
stages. Its ranks count data-parallel neighbours first, then pipeline ranks (its default order
``tp-cp-ep-dp-pp``, without tensor, context and expert parallelism here).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

from planner.artifacts.names import compress_devices
from planner.artifacts.plan import Plan
from planner.costs.placement import StageSpec, place
from planner.errors import shorten
from planner.export.exported import Exported
from planner.export.megatron_form import MegatronForm, megatron_form
from planner.export.megatron_head import has_untied_head
from planner.export.megatron_recompute import Recomputed, recomputed
from planner.export.their_order import order_notes
from planner.importing.megatron_layout import render_layout
from planner.schedule.classics import WHOLE
from planner.schedule.equal_pipelines import orders_of_pipelines
from planner.simulator import Timeline, simulate
from planner.sync.lanes import node_of
from planner.sync.strategies import TOGETHER
from planner.units import format_bytes

FILE = "megatron.sh"


def export(plan: Plan) -> Exported:
    """The layout of a plan's stages, with the flags that belong to it.

    Args:
        plan: verified.

    Raises:
        PipeplanError: with every reason why Megatron-LM cannot run its stages.
    """
    form = megatron_form(plan)
    again = recomputed(plan, form.stack)
    theirs = _as_megatron_runs_it(plan, form, again)
    notes = (
        *order_notes("Megatron", _order_name(form), plan, theirs),
        *again.notes,
        *_memory_notes(theirs),
        *_sync_notes(plan),
        *_node_notes(form),
    )
    return Exported({FILE: _script(plan, form, again)}, _use(form), notes)


def _script(plan: Plan, form: MegatronForm, again: Recomputed) -> str:
    lines = (*_flags(plan, form), *again.flags, *_untied(plan, form))
    flags = "".join(f"    {line}\n" for line in lines)
    ranks = "".join(
        f"#   rank {i}: {_in_a_comment(device)}\n" for i, device in enumerate(form.ranks)
    )
    return (
        f"# {shorten(plan.model.name)} on {shorten(plan.cluster.name)}, written by Pipeplan for "
        "Megatron-LM.\n"
        "# Source this in the script that starts Megatron-LM and add these arguments to its own:\n"
        '#   torchrun … pretrain_gpt.py "${PIPEPLAN_ARGS[@]}" …\n'
        "# The plan's devices, in Megatron's order of ranks (tp-cp-ep-dp-pp):\n"
        f"{ranks}"
        f"PIPEPLAN_ARGS=(\n{flags})\n"
    )


def _in_a_comment(name: str) -> str:
    """A name from a plan, which may hold the end of a line, as the shell passes over it."""
    return name if name.isprintable() else json.dumps(name)


def _flags(plan: Plan, form: MegatronForm) -> tuple[str, ...]:
    samples = plan.job.samples_per_microbatch
    return (
        f"--num-layers {len(form.stack.blocks)}",
        f"--pipeline-model-parallel-size {form.pipeline_size}",
        f'--pipeline-model-parallel-layout "{render_layout(form.stages)}"',
        f"--micro-batch-size {samples}",
        f"--global-batch-size {samples * plan.microbatches}",
    )


def _untied(plan: Plan, form: MegatronForm) -> tuple[str, ...]:
    """The flag, with why, of a head with weights of its own; Megatron-LM ties them by default."""
    if not has_untied_head(plan, form.stack):
        return ()
    return (
        "# Output weights of the plan's model are not its embedding's; Megatron-LM would tie them.",
        "--untie-embeddings-and-output-weights",
    )


def _use(form: MegatronForm) -> tuple[str, ...]:
    pipelines = len(form.lanes)
    data = f" (pipeline {form.pipeline_size} x data {pipelines})" if pipelines > 1 else ""
    return (
        f"in the script that starts Megatron-LM on {len(form.ranks)} ranks{data}: "
        f'source FOLDER/{FILE}, then add "${{PIPEPLAN_ARGS[@]}}" to its arguments',
        "model, sequence length, precision, optimizer and data stay arguments of your own; leave "
        "other flags of the pipeline's division out",
    )


def _as_megatron_runs_it(plan: Plan, form: MegatronForm, again: Recomputed) -> Timeline:
    """The same stages in Megatron's own order."""
    specs = [
        StageSpec(stage.layers, form.devices_of(stage.index), row)
        for stage, row in zip(plan.stages, again.layers, strict=True)
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


def _memory_notes(theirs: Timeline) -> Iterator[str]:
    for device in theirs.overflow_bytes:
        yield (
            f"Megatron's order holds {format_bytes(theirs.peak_memory_bytes[device])} on {device}, "
            f"which has {format_bytes(theirs.pipeline.capacity_bytes(device))}: expect it to run "
            "out of memory; recompute more, use smaller microbatches, or shard the optimizer "
            "(--use-distributed-optimizer)"
        )


def _sync_notes(plan: Plan) -> Iterator[str]:
    if plan.sync.strategy not in TOGETHER:
        yield (
            f"Megatron reduces gradients over all replicas in step; {plan.sync.strategy} is left "
            "behind"
        )


def _node_notes(form: MegatronForm) -> Iterator[str]:
    """A launcher such as torchrun numbers the ranks of one node in a row."""
    nodes = [node for node, _ in groupby(form.ranks, node_of)]
    if len(set(nodes)) < len(nodes):
        yield (
            f"ranks in Megatron's order are on {compress_devices(form.ranks)}: nodes do not follow "
            "each other, so give each rank its device with a launcher that can (a rankfile, or "
            "one torchrun a device)"
        )
