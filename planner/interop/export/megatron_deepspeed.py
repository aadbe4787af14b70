"""Export to Megatron-DeepSpeed: its arguments, and a configuration of DeepSpeed.

Meanings are those of ``GPTModelPipe`` in ``megatron/model/gpt_model.py`` and of
``megatron/arguments.py`` at github.com/deepspeedai/Megatron-DeepSpeed 4efb479, and, for embedding
and head that count as a block each, of github.com/bigscience-workshop/Megatron-DeepSpeed. It gives
every pipeline rank equally many blocks, runs 1F1B with one stage a rank, and recomputes all blocks
or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import PipeplanError
from planner.interop.export.deepspeed import batch_config, precision_problems
from planner.interop.export.exported import Exported, split_notes
from planner.interop.export.megatron import (
    blocks_in,
    has_untied_head,
    node_notes,
    outside_notes,
    ranks_in_words,
    run_by_megatron,
    script_of,
    sizes,
    untied,
)
from planner.interop.export.megatron_form import MegatronForm, megatron_form
from planner.interop.export.notes import order_notes, overfull, reduction_notes
from planner.plan.plan import Plan
from planner.simulation.timeline import Timeline

TARGET, TOOL = "megatron-deepspeed", "Megatron-DeepSpeed"
FILE, CONFIG = "megatron_deepspeed.sh", "ds_config.json"
_RECOMPUTED = (
    "--checkpoint-activations",
    "--checkpoint-num-layers 1",
    "--deepspeed-activation-checkpointing",
)


@dataclass(frozen=True)
class MegatronDealing:
    """How blocks are dealt out to pipeline ranks.

    Attributes:
        counts_ends: whether embedding and head count as a block each.
    """

    counts_ends: bool

    @property
    def arguments(self) -> tuple[str, ...]:
        """What says so."""
        return ("--pp-partition-method 'type:transformer|embedding'",) if self.counts_ends else ()

    @classmethod
    def of(cls, plan: Plan, form: MegatronForm) -> MegatronDealing:
        """Return the way that gives a plan's stages; DeepSpeed finds one partition of equal ones.

        Raises:
            PipeplanError: if there is none.
        """
        counts = [stage.count("t") for stage in form.stages]
        if len(set(counts)) == 1:
            return cls(counts_ends=False)
        ends = [counts[0] + 1, *counts[1:-1], counts[-1] + 1]
        if len(set(ends)) == 1 and not has_untied_head(plan, form.stack):
            return cls(counts_ends=True)
        tied = " with tied embeddings" if has_untied_head(plan, form.stack) else ""
        raise PipeplanError(
            f"{TARGET}: stages: they hold {', '.join(map(str, counts))} blocks, but {TOOL} gives "
            f"every pipeline rank equally many, or the first and the last{tied} one less than the "
            "others; adopt such stages (`pipeplan adopt`), or export --to deepspeed, which "
            "takes any for a list of layers of your own"
        )


def export(plan: Plan) -> Exported:
    """Return Megatron-DeepSpeed's arguments of a plan, and ``ds_config.json``.

    Args:
        plan: verified.

    Raises:
        PipeplanError: with every reason why it cannot run the plan.
    """
    form = megatron_form(plan, TARGET)
    problems = [*precision_problems(plan), *_interleaved(form)]
    if problems:
        raise PipeplanError(f"{TARGET}: {problem}" for problem in problems)
    division, recompute = MegatronDealing.of(plan, form), _recomputed(plan, form)
    theirs = run_by_megatron(plan, form, recompute)
    if full := overfull(theirs):
        raise PipeplanError(
            f"{TARGET}: orders: it runs 1F1B, and then {row}; reduce memory: smaller microbatches, "
            "or recompute = true"
            for row in full
        )
    lines = (
        *sizes(plan, form, *division.arguments),
        f"--zero-stage {int(_shares_state(plan, form))}",
        *(_RECOMPUTED if any(recompute) else ()),
        *untied(plan, form),
    )
    config = batch_config(plan, len(form.pipelines))
    return Exported(
        files={
            FILE: script_of(plan, form, TOOL, lines),
            CONFIG: json.dumps(config, indent=1) + "\n",
        },
        use=tuple(_use(plan, form)),
        notes=tuple(_notes(plan, form, division, recompute, theirs)),
    )


def _interleaved(form: MegatronForm) -> Iterator[str]:
    if form.is_interleaved:
        yield (
            f"stages: {len(form.stages)} on {form.pipeline_size} pipeline ranks, but DeepSpeed has "
            "one stage a rank; plan again with max_stages_per_device = 1 in the job"
        )


def _shares_state(plan: Plan, form: MegatronForm) -> bool:
    return plan.job.shards_state and len(form.pipelines) > 1


def _recomputed(plan: Plan, form: MegatronForm) -> list[tuple[str, ...]]:
    """Return the layers of every stage that run again: all blocks if the plan recomputes any."""
    held = [blocks_in(stage, form.stack) for stage in plan.stages]
    blocks = [tuple(name for block in row for name in block) for row in held]
    again = {name for stage in plan.stages for name in stage.recompute}
    is_any = any(not again.isdisjoint(row) for row in blocks)
    return blocks if is_any else [()] * len(held)


def _use(plan: Plan, form: MegatronForm) -> Iterator[str]:
    yield (
        f"in the script that starts {TOOL} on {ranks_in_words(plan, form)}: source FOLDER/{FILE}, "
        f'then add "${{PIPEPLAN_ARGS[@]}}" --deepspeed --deepspeed_config FOLDER/{CONFIG} to its '
        "arguments"
    )
    yield (
        "model, sequence length, precision, optimizer and data remain your own arguments; leave "
        "--no-pipeline-parallel out"
    )


def _notes(
    plan: Plan,
    form: MegatronForm,
    division: MegatronDealing,
    recompute: list[tuple[str, ...]],
    theirs: Timeline,
) -> Iterator[str]:
    yield from order_notes(TOOL, "1F1B", plan, theirs)
    yield from outside_notes(plan, form.stack, TOOL)
    ends = {*form.stack.before, *form.stack.after}
    if any(
        set(stage.recompute) - ends != set(row)
        for stage, row in zip(plan.stages, recompute, strict=True)
    ):
        yield (
            f"{TOOL} recomputes every block, where the plan recomputes some; the predicted time "
            "and memory count that"
        )
    if division.counts_ends:
        yield (
            "--pp-partition-method is an argument of github.com/bigscience-workshop/"
            "Megatron-DeepSpeed alone: others count blocks only, and would deal them out otherwise"
        )
    if plan.job.sequence_parallel:
        yield (
            "--sequence-parallel is an argument of github.com/deepspeedai/Megatron-DeepSpeed "
            f"alone; {CONFIG} keeps pipe_partitioned and grad_partitioned off, since each rank "
            "hands on its own positions"
        )
    yield from reduction_notes(plan, f"{TOOL} reduces them after all backwards")
    if len(form.pipelines) > 1 and plan.sync.strategy != "all_reduce":
        yield f"sync: {plan.sync.strategy!r} is not exported; {TOOL} averages gradients every step"
    yield from node_notes(form)
    yield from split_notes(plan, f"{TOOL} pads the vocabulary to a multiple and splits it")
