"""A plan in Megatron-LM's terms (blocks, stages, ranks, pipelines), or why it has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from planner.errors import PipeplanError
from planner.interop.export.cuts import stage_of_layer
from planner.interop.export.exported import split_problems
from planner.interop.importing.megatron_layout import render_layout
from planner.model.blocks import BlockStack, block_stack
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import compress_devices
from planner.plan.plan import Plan
from planner.sync.pipeline_replicas import pipeline_replicas_of
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
    try:
        stack = block_stack(LayerGraph.from_record(plan.model.graph))
    except PipeplanError as error:
        problems += error.problems
    if stack is not None:
        problems += _layout_problems(plan, stack)
    problems += _rank_problems(plan)
    problems += split_problems(plan, "Megatron-LM")
    if stack is None or problems:
        raise PipeplanError(f"megatron: {problem}" for problem in problems)
    pipelines = _pipelines(plan)
    symbols = _symbols(stack, stage_of_layer(plan), len(plan.stages))
    if "m" in "".join(symbols[: -len(pipelines[0])]):
        raise PipeplanError(
            "megatron: multi-token prediction is not in the last stage of its rank, where "
            f"Megatron-LM has it; {MOVE}"
        )
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


def _layout_problems(plan: Plan, stack: BlockStack) -> list[str]:
    stage_of, last = stage_of_layer(plan), len(plan.stages) - 1
    problems = [
        *_outside("embedding", "E", stack.before, 0, stage_of),
        *_divided(stack, stage_of),
        *_out_of_order(stack, stage_of),
        *_prediction_away(stack, stage_of),
        *_outside("head and loss", "L", stack.after, last, stage_of),
    ]
    return [*problems, *_nearest(plan, stack, stage_of)] if problems else []


def _outside(
    part: str, symbol: str, layers: Sequence[str], expected: int, stage_of: Mapping[str, int]
) -> Iterator[str]:
    """Yield layers of the embedding or the head that are not in its stage."""
    away = [
        f"{layer} in stage {stage_of[layer]}" for layer in layers if stage_of[layer] != expected
    ]
    if away:
        yield (
            f"{', '.join(away)}: {symbol} is the whole {part} ({', '.join(layers)}), in stage "
            f"{expected} of the layout; {MOVE}"
        )


def _divided(stack: BlockStack, stage_of: Mapping[str, int]) -> Iterator[str]:
    for block in stack.blocks:
        stages = sorted({stage_of[layer] for layer in block.layers})
        if len(stages) > 1:
            yield (
                f"block {block.name} is divided between stages {' and '.join(map(str, stages))}: "
                f"t is a whole block ({', '.join(block.layers)}); {MOVE}"
            )


def _out_of_order(stack: BlockStack, stage_of: Mapping[str, int]) -> Iterator[str]:
    for before, after in pairwise(stack.blocks):
        first, second = stage_of[before.layers[0]], stage_of[after.layers[0]]
        if second < first:
            yield (
                f"block {after.name} is in stage {second}, {before.name} before it in stage "
                f"{first}: stages must hold consecutive blocks; {MOVE}"
            )


def _prediction_away(stack: BlockStack, stage_of: Mapping[str, int]) -> Iterator[str]:
    stages = sorted({stage_of[name] for block in stack.prediction for name in block.layers})
    if len(stages) > 1 or (stages and stages[0] < stage_of[stack.blocks[-1].layers[-1]]):
        yield (
            f"multi-token prediction is in stages {', '.join(map(str, stages))}: m is all of it in "
            f"one stage, behind the last block; {MOVE}"
        )


def _nearest(plan: Plan, stack: BlockStack, stage_of: Mapping[str, int]) -> Iterator[str]:
    """Yield the layout with E, blocks and L in one piece each, if there is one."""
    symbols = _symbols(stack, stage_of, len(plan.stages))
    if all(symbols) and not list(_out_of_order(stack, stage_of)):
        yield (
            "the nearest layout, to be simulated as a plan: pipeplan adopt MODEL … "
            f"--stages '{render_layout(symbols)}'"
        )


def _rank_problems(plan: Plan) -> list[str]:
    groups = [frozenset(stage.devices) for stage in plan.stages]
    sizes = sorted({len(group) for group in groups})
    if len(sizes) > 1:
        counts = ", ".join(str(len(group)) for group in groups)
        return [
            f"stages have {counts} replicas: Megatron's data parallelism gives every stage equally "
            "many; plan again with `pipeplan plan … --sync semi_decentralized`, whose stages have, "
            "or set replication = false in the job"
        ]
    size = len(set(groups))
    if len(frozenset[str]().union(*groups)) < size * sizes[0]:
        return [*_overlap_problems(groups)]
    return [*_place_problems(groups, size)] or [*_microbatch_problems(plan, size, sizes[0])]


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


def _pipelines(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return the pipelines that the plan's orders form, else replica r of every stage."""
    size = len({frozenset(stage.devices) for stage in plan.stages})
    replicas = len(plan.stages[0].devices)
    try:
        pipelines = tuple(pipeline.devices for pipeline in pipeline_replicas_of(plan))
    except PipeplanError:
        pipelines = ()
    if len(pipelines) == replicas and all(len(pipeline) == size for pipeline in pipelines):
        return pipelines
    return tuple(zip(*(stage.devices for stage in plan.stages[:size]), strict=True))
