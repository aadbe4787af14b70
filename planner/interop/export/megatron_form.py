"""A plan in Megatron-LM's terms (blocks, stages, ranks, pipelines), or why it has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from planner.errors import PipeplanError
from planner.interop.division import render_layout
from planner.interop.export.cuts import (
    StageDevices,
    stage_devices_by_replica,
    stage_of_layer,
)
from planner.interop.export.exported import split_problems
from planner.model.blocks import BlockStack, block_stack
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import compress_devices
from planner.plan.plan import Plan
from planner.units import and_more

MOVE = "move the cut in the plan's stages and run `pipeplan simulate PLAN -o PLAN`"


@dataclass(frozen=True)
class MegatronForm:
    """A plan in Megatron-LM's terms.

    Attributes:
        stack: embedding, blocks and head.
        stages: symbols of each stage, such as ``Ett``.
        pipelines: the device of each pipeline rank, for each pipeline.
        members: the devices of each group that pipelines name; of single devices themselves.
    """

    stack: BlockStack
    stages: tuple[str, ...]
    pipelines: tuple[tuple[str, ...], ...]
    members: Mapping[str, tuple[str, ...]]

    @property
    def pipeline_size(self) -> int:
        """Ranks of a pipeline."""
        return len(self.pipelines[0])

    @property
    def ranks(self) -> tuple[str, ...]:
        """Devices in Megatron's order of ranks: groups, then pipelines, then pipeline ranks."""
        return tuple(
            device
            for place in zip(*self.pipelines, strict=True)
            for name in place
            for device in self.members[name]
        )

    def devices_of(self, stage: int) -> tuple[str, ...]:
        """The device, or group, of each pipeline that holds a stage."""
        return tuple(pipeline[stage % self.pipeline_size] for pipeline in self.pipelines)


def megatron_form(plan: Plan) -> MegatronForm:
    """Return blocks, stages and ranks of a verified plan.

    Raises:
        PipeplanError: with every reason why Megatron-LM cannot run such stages.
    """
    problems: list[str] = []
    stack: BlockStack | None = None
    by_pipeline: tuple[StageDevices, ...] = ()
    try:
        stack = block_stack(LayerGraph.from_record(plan.model.graph))
        problems += _layout_problems(plan, stack)
    except PipeplanError as error:
        problems += error.problems
    try:
        by_pipeline = stage_devices_by_replica(plan)
        problems += _rank_problems(plan)
    except PipeplanError as error:
        problems += error.problems
    problems += split_problems(plan, "Megatron-LM")
    if stack is None or problems:
        raise PipeplanError(f"megatron: {problem}" for problem in problems)
    size = len(set(by_pipeline[0]))
    symbols = _symbols(stack, stage_of_layer(plan), len(plan.stages))
    if "m" in "".join(symbols[:-size]):
        raise PipeplanError(
            "megatron: multi-token prediction is not in the last stage of its rank, where "
            f"Megatron-LM has it; {MOVE}"
        )
    pipelines = tuple(devices[:size] for devices in by_pipeline)
    members = {name: plan.members(name) for row in pipelines for name in row}
    return MegatronForm(stack, symbols, pipelines, members)


def _symbols(stack: BlockStack, stage_of: Mapping[str, int], count: int) -> tuple[str, ...]:
    """Return the stages' symbols, with each block where its first layer is."""
    rows = [""] * count
    rows[0] = "E"
    for symbol, blocks in (("t", stack.blocks), ("m", stack.prediction)):
        for block in blocks:
            rows[stage_of[block.layers[0]]] += symbol
    rows[-1] += "L"
    return tuple(rows)


def _layout_problems(plan: Plan, stack: BlockStack) -> Iterator[str]:
    """Yield layers that are in another stage than their symbol, and the nearest layout.

    A block is where its first layer is. Data flow keeps the blocks of a verified plan in order.
    """
    stage_of, last = stage_of_layer(plan), len(plan.stages) - 1
    ahead = tuple(layer for block in stack.prediction for layer in block.layers)
    parts = [("E is the whole embedding", stack.before, 0)]
    for block in stack.blocks:
        parts.append(("t is a whole block", block.layers, stage_of[block.layers[0]]))
    if ahead:
        parts.append(("m is all multi-token prediction", ahead, stage_of[ahead[0]]))
    parts.append(("L is the whole head and loss", stack.after, last))
    is_whole = True
    for meaning, layers, expected in parts:
        away = [
            f"{name} in stage {stage_of[name]}" for name in layers if stage_of[name] != expected
        ]
        if away:
            is_whole = False
            yield (
                f"{', '.join(away)}: {meaning} ({', '.join(layers)}), in stage {expected} of the "
                f"layout; {MOVE}"
            )
    symbols = _symbols(stack, stage_of, len(plan.stages))
    if not is_whole and all(symbols):
        yield (
            "the nearest layout, to be simulated as a plan: pipeplan adopt MODEL … "
            f"--stages '{render_layout(symbols)}'"
        )


def _rank_problems(plan: Plan) -> list[str]:
    groups = [frozenset(stage.devices) for stage in plan.stages]
    replicas = len(groups[0])
    size = len(set(groups))
    if len(frozenset[str]().union(*groups)) < size * replicas:
        return [*_overlap_problems(groups)]
    return [*_place_problems(groups, size)] or [*_microbatch_problems(plan, size, replicas)]


def _overlap_problems(groups: Sequence[frozenset[str]]) -> Iterator[str]:
    """Yield a line if two pipeline ranks share only some devices."""
    for (i, first), (j, second) in combinations(enumerate(groups), 2):
        if first != second and first & second:
            yield (
                f"stage {i} is on {_listed(first)}, stage {j} on {_listed(second)}: replicas of a "
                "pipeline rank hold the same stages; plan again with `pipeplan plan … --sync "
                "semi_decentralized`, whose pipelines keep to themselves"
            )
            return


def _place_problems(groups: Sequence[frozenset[str]], size: int) -> Iterator[str]:
    """Yield stages that are not on pipeline rank i mod PP, and ranks with uneven stages."""
    remedy = (
        "plan again with max_stages_per_device = 1 in the job, or give ranks their stages in turn "
        "with `pipeplan adopt --stages`"
    )
    wrong = [i for i, group in enumerate(groups) if group != groups[i % size]]
    if wrong:
        first = wrong[0]
        others = and_more(len(wrong) - 1, "stage")
        yield (
            f"stage {first} is on {_listed(groups[first])}{others}: Megatron puts stage i on "
            f"pipeline rank i % {size}, stage {first} where stage {first % size} is, on "
            f"{_listed(groups[first % size])}; {remedy}"
        )
    elif len(groups) % size:
        yield (
            f"{len(groups)} stages on {size} pipeline ranks: every rank holds equally many; "
            f"{remedy}"
        )
    elif len(groups) > size == 1:
        yield (
            f"all {len(groups)} stages are on {_listed(groups[0])}: interleaving needs two "
            "pipeline ranks at least; merge the stages into one"
        )


def _listed(group: frozenset[str]) -> str:
    return compress_devices(sorted(group))


def _microbatch_problems(plan: Plan, size: int, replicas: int) -> Iterator[str]:
    share, rest = divmod(plan.microbatches, replicas)
    if rest or not share:
        yield (
            f"job.microbatches: {plan.microbatches} cannot be shared out equally among {replicas} "
            f"pipelines; set it to a multiple of {replicas}"
        )
        return
    if len(plan.stages) > size and share % size:
        each = f", {share} for each of {replicas} pipelines" if replicas > 1 else ""
        yield (
            f"job.microbatches: {plan.microbatches}{each}: Megatron's interleaved 1F1B asks for a "
            f"multiple of the {size} pipeline ranks; set it to a multiple of {size * replicas} and "
            "plan again"
        )
