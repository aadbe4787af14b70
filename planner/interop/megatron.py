"""Megatron-LM: its launch arguments as a layout of plans, and plans as its launch arguments.

Meanings are those of Megatron-LM d98e8a6 (``megatron/training/arguments.py``) and megatron-core
0.16.1: ``TransformerConfig.__post_init__``, ``get_num_layers_to_build`` of
``transformer_block.py``, ``parallel_state.py`` for experts, ``schedules.py`` in
``pipeline_parallel``. Names are those of the arguments, of the fields that they set in
``TransformerConfig``, and of ``megatron/arguments.py`` of Megatron-DeepSpeed
(github.com/bigscience-workshop and deepspeedai). What these refuse is refused.

Megatron-LM takes stages, not orders: it runs 1F1B, or interleaved 1F1B where a rank holds several
stages. Its ranks count data-parallel neighbours first, then pipeline ranks (its default order
``tp-cp-ep-dp-pp``, without context and expert parallelism here), and the devices of a
tensor-parallel group before both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path
from typing import NamedTuple

from planner.cluster.cluster import node_of
from planner.costs.gradients import sums_in_float32
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError, shorten
from planner.interop.arguments import OFF, PASTE, Argument, ArgumentFile, read_arguments
from planner.interop.deepspeed import PARTITION_METHOD, DeepSpeedPartition
from planner.interop.division import (
    Division,
    divide_by_symbols,
    parse_layout,
    render_layout,
    stages_of_counts,
)
from planner.interop.exported import (
    Exported,
    StageDevices,
    devices_by_replica,
    order_notes,
    ranks_of,
    reduction_notes,
    split_notes,
    split_problems,
    stage_of_layer,
)
from planner.interop.layout import LayoutNames, RuntimeLayout
from planner.interop.torch_pipelining import ScheduleTable
from planner.job import GradientPrecision, Precision
from planner.model.blocks import BlockStack, block_stack
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import compress_devices, in_turn
from planner.plan.plan import Plan
from planner.schedules.pipelines import orders_of_pipelines
from planner.schedules.published import WHOLE
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.sync.strategies import SYNCHRONOUS
from planner.units import and_more, format_bytes, plural

NAMES = LayoutNames(
    tensor="--tensor-model-parallel-size",
    pipeline="--pipeline-model-parallel-size",
    data="--replicas",
    microbatch="--micro-batch-size",
    batch="--global-batch-size",
)
_WITH_VALUE = frozenset(
    """tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
    expert-model-parallel-size expert-tensor-parallel-size num-layers mtp-num-layers
    num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
    microbatch-group-size-per-virtual-pipeline-stage micro-batch-size global-batch-size
    pipeline-model-parallel-layout recompute-granularity recompute-method recompute-num-layers
    recompute-modules checkpoint-num-layers pp-partition-method zero-stage
    moe-token-dispatcher-type moe-expert-capacity-factor
    data-parallel-sharding-strategy""".split()
)
_SWITCHES = frozenset(
    """sequence-parallel use-distributed-optimizer overlap-grad-reduce
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
    recompute-activations checkpoint-activations tp-comm-overlap overlap-param-gather
    no-overlap-p2p-communication untie-embeddings-and-output-weights deepspeed
    no-pipeline-parallel bf16 fp16 accumulate-allreduce-grads-in-fp32
    grad-reduce-in-bf16""".split()
)
_REFUSED = {
    "use-megatron-fsdp": "plans keep whole parameters in every pipeline; leave it out",
    "use-torch-fsdp2": "plans keep whole parameters in every pipeline; leave it out",
    "rampup-batch-size": "a plan is of one batch size; give that of most iterations alone",
    "hybrid-layer-pattern": "stages are of equal blocks; give --pipeline-model-parallel-layout",
    "num-distributed-optimizer-instances": "all pipelines share one optimizer state; leave it out",
    "use-checkpoint-args": "the checkpoint's arguments are not in the file; paste them",
    "yaml-cfg": "the arguments are in another file; give that one",
    "heterogeneous-layers-config-path": "blocks are counted as equal; give the stages (--stages)",
    "distribute-saved-activations": "plans keep what blocks start from whole; leave it out",
    "use-tp-pp-dp-mapping": (
        "replicas of a stage are neighbours here; leave it out, and give the devices in the order "
        "of tp, dp, pp (--devices)"
    ),
    "cpu-offloading": "plans keep stashes on the device; leave it out",
    "fine-grained-activation-offloading": "plans keep stashes on the device; leave it out",
}
_ALIASES = {
    "tensor-parallel-size": "tensor-model-parallel-size",
    "pipeline-parallel-size": "pipeline-model-parallel-size",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "deepspeed-config": "deepspeed",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
}
"""Names of the same thing: fields of ``TransformerConfig``, which frameworks around it take."""
_KNOWN = _WITH_VALUE | _SWITCHES | _REFUSED.keys()
_CONCERNS = re.compile(
    r"(?:^|-)(?:pipeline|parallel|parallelism|pp|tp|dp|cp|vpp|virtual|stages?|micro|microbatch"
    r"|microbatches|batch|gbs|mbs|recompute|recomputation|interleaved?|layers|partition|fsdp|hsdp"
    r"|zero|offload|offloading|mtp|activations|p2p)(?:-|$)"
)
_UNRELATED = re.compile(
    # Messages, precision, experts, checkpoints, evaluation, inference: they divide nothing.
    r"""cp-comm-type|tp-comm-.*|batch-p2p-.*|overlap-p2p-communication.*|(?:no-)?ckpt-.*|dist-ckpt-.*
    |.*-(?:start|end)-in-bf16|pipeline-model-parallel-comm-backend|data-parallel-random-init
    |deepspeed-.*|partition-activations|contigious-checkpointing|zero-.*|eval-.*
    |mtp-.*|inference-.*|rl-.*|vllm-.*|check-.*|offload-(?:model|bridge|optimizer|teacher-model)
    |first-last-layers-.*|rotary-.*|async-tensor-model-parallel-allreduce
    |no-async-tensor-model-parallel-allreduce|expert-.*|moe-.*|megatron-fsdp-.*|fsdp-.*
    |overlap-moe-expert-parallel-comm|num-layers-at-.*|optimizer-.*offload.*|.*-optimizer-.*
    |use-torch-optimizer-for-cpu-offload|sequence-parallel-.*|freeze-.*|muon-tp-mode
    |use-same-sampling-seed-across-dp-ranks|decrease-batch-size-if-needed|indexer-batch-size
    |context-parallel-.*|hierarchical-context-parallel-sizes|checkpoint-in-cpu|synchronize-.*
    |profile-.*|log-.*|save-.*|load-.*|test-.*|lora-.*|ds-.*|aux-.*|vit-.*|per-device-eval-.*""",
    re.VERBOSE,
)
_LAYOUT = "pipeline-model-parallel-layout"
_EACH = "num-layers-per-virtual-pipeline-stage"
_CHUNKS = "num-virtual-stages-per-pipeline-rank"
_FIRST, _LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
_EMBEDDING = "account-for-embedding-in-pipeline-split"
_LOSS = "account-for-loss-in-pipeline-split"
_TURN = "microbatch-group-size-per-virtual-pipeline-stage"
_EXCLUDING = ((_LAYOUT, _EACH, _CHUNKS), (_LAYOUT, _FIRST, _EMBEDDING), (_LAYOUT, _FIRST, _LOSS),
              (_LAYOUT, _LAST, _EMBEDDING), (_LAYOUT, _LAST, _LOSS), (_EACH, _FIRST),
              (_EACH, _LAST))  # fmt: skip
"""Arguments of which Megatron-LM takes one alone."""
_BLOCKS, _AHEAD = "num-layers", "mtp-num-layers"
_NUMBERS = (_BLOCKS, _EACH, _CHUNKS, _FIRST, _LAST, _TURN)
_OF_STAGES = (_LAYOUT, _EACH, _CHUNKS, _FIRST, _LAST, _EMBEDDING, _LOSS, _AHEAD)
"""Arguments that deal out blocks."""


_NOTES = {
    "no-overlap-p2p-communication": (
        "with --runtime megatron messages block as in megatron-blocking, where ranks hold several "
        "stages"
    ),
    "tp-comm-overlap": (
        "collectives inside a group are predicted as if nothing were computed meanwhile"
    ),
    "overlap-param-gather": (
        "parameters are gathered right after the optimizer's step here, and nothing hides that"
    ),
}
_CORE = "core_attn"
_EMPTY = (
    "stage {} is empty: Megatron-LM sends activations and gradients by way of its rank, where the "
    "plan sends them past it in one message"
)


# --- the arguments --------------------------------------------------------------------------------


def read_megatron_arguments(path: str | Path) -> RuntimeLayout:
    """Read Megatron-LM's arguments as a layout; those that divide nothing are left out.

    Args:
        path: of a launch script, of the arguments alone, or of YAML or JSON with a value for each
            name, as Megatron-LM's tests and frameworks around it have.

    Raises:
        PipeplanError: naming every argument that is wrong, or that plans cannot express.
    """
    file = read_arguments(path, "Megatron-LM", _SWITCHES)
    found = _Arguments(file)
    for argument in file.given:
        found.take(argument)
    if not found.values and not file.problems:
        raise PipeplanError(
            f"{path}: has no argument of Megatron-LM that lays out a model, such as "
            "--pipeline-model-parallel-size or --micro-batch-size; paste the arguments of the run"
        )
    layout = _layout(found)
    file.require_right()
    return layout


@dataclass
class _Arguments:
    """The arguments that lay a model out: words by name, without dashes; a switch has none."""

    file: ArgumentFile
    values: dict[str, str] = field(default_factory=dict)

    def take(self, argument: Argument) -> None:
        """Note an argument, or what is wrong with it.

        Raises:
            PipeplanError: if it has no value and needs one.
        """
        name = argument.name.rpartition(".")[2].lstrip("-")
        name = _ALIASES.get(name, name)
        given = argument.value
        if self.file.mapping is not None and given in (None, False):
            return
        if name not in _KNOWN:
            if _CONCERNS.search(name) and not _UNRELATED.fullmatch(name):
                meant = [known for known in sorted(_KNOWN) if known.startswith(name)]
                remedy = f"write it in full, --{meant[0]}" if len(meant) == 1 else "leave it out"
                self.wrong(
                    name, f"is no argument of Megatron-LM known here; correct it, or {remedy}"
                )
            return
        if name in _SWITCHES:
            if str(given).lower() in OFF:
                return
            value = ""
        elif given is None and name in _WITH_VALUE:
            raise PipeplanError(f"{self.file.source}: --{name}: has no value; write one behind it")
        else:
            value = _text(name, argument)
        if not argument.is_literal:
            self.wrong(name, f"{shorten(value)}: {PASTE}" if value else PASTE)
        elif name in _REFUSED:
            self.wrong(name, _REFUSED[name])
        elif self.values.setdefault(name, value) != value:
            self.wrong(name, f"{shorten(self.values[name])} and {shorten(value)}; give it once")

    def has(self, name: str) -> bool:
        """Return whether an argument was given."""
        return name in self.values

    def number(self, name: str) -> int | None:
        """Return the value of an argument as a number of at least 1; None if it was not given."""
        text = self.values.get(name)
        if text is None or (name == _AHEAD and text == "0"):
            return None
        if re.fullmatch("[1-9][0-9]{0,8}", text):
            return int(text)
        self.wrong(name, f"{shorten(text)}: expected a whole number of at least 1; correct it")
        return 1

    def wrong(self, name: str, problem: str) -> None:
        """Note a problem of an argument."""
        self.file.wrong(f"--{name}", problem)


def _text(name: str, argument: Argument) -> str:
    """Return the value of an argument as one string."""
    if name == _LAYOUT and isinstance(argument.value, list):  # megatron-core's other form.
        symbols = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
        rows = (row if isinstance(row, list) else [row] for row in argument.value)
        return "|".join("".join(symbols.get(str(part), str(part)) for part in row) for row in rows)
    if isinstance(argument.value, list):
        return " ".join(map(str, argument.value))
    more = argument.more if name == "recompute-modules" else ()
    return " ".join((str("" if argument.value is None else argument.value), *more))


def _layout(found: _Arguments) -> RuntimeLayout:
    if (context := found.number("context-parallel-size")) not in (None, 1):
        found.wrong(
            "context-parallel-size",
            f"{context}: context parallel groups are not planned; set it to 1 and use tensor "
            "parallelism, pipelines or replicas instead",
        )
    degree = found.number("tensor-model-parallel-size") or 1
    size = found.number("pipeline-model-parallel-size") or 1
    samples, batch = found.number("micro-batch-size"), found.number("global-batch-size")
    partition = _partition(found, size, degree)
    stages = _Stages(found, size)
    notes = [f"--{name}: {note}" for name, note in _NOTES.items() if found.has(name)]
    return RuntimeLayout(
        source=found.file.source,
        names=NAMES,
        divide=partition.divide if partition else stages.divide,
        table=None if partition else stages.table,
        tensor_parallel=degree,
        # Megatron-LM leaves sequence parallelism off where a group is one device.
        sequence_parallel=found.has("sequence-parallel") and degree > 1,
        expert_parallel=_has_whole_experts(found, degree),
        pipeline_size=size,
        blocks_messages=not stages.overlaps,
        samples_per_microbatch=samples,
        global_batch=batch,
        share=1 if samples is not None and batch is None else None,
        recompute_blocks=_recompute_blocks(found),
        recompute_attention=_recomputes_attention(found),
        shard_optimizer=found.has("use-distributed-optimizer") or _is_zero_1(found),
        overlap_reduction=found.has("overlap-grad-reduce"),
        precision=_precision(found),
        gradient_precision=_gradient_precision(found),
        notes=(*found.file.notes, *notes, *map(_EMPTY.format, stages.empty)),
    )


def _partition(found: _Arguments, size: int, degree: int) -> DeepSpeedPartition | None:
    """Return how DeepSpeed's pipeline deals out layers; None where it is Megatron-LM's own."""
    if size == 1 or not any(map(found.has, (PARTITION_METHOD, "deepspeed", "zero-stage"))):
        return None
    if found.has("no-pipeline-parallel"):
        found.wrong("no-pipeline-parallel", f"with {size} pipeline ranks; leave one of them out")
    for name in filter(found.has, _OF_STAGES):
        found.wrong(name, f"DeepSpeed's pipeline has --{PARTITION_METHOD} alone; leave it out")
    method = found.values.get(PARTITION_METHOD, "type:transformer")
    if method.lower() == "parameters" and degree > 1:
        found.wrong(
            PARTITION_METHOD,
            f"parameters: DeepSpeed counts those of a rank, and {degree} ranks of a group "
            "divide some of a block's; give the stages (--stages)",
        )
    return DeepSpeedPartition(
        found.file.source,
        method,
        size,
        is_tied=not found.has("untie-embeddings-and-output-weights"),
        converts=found.has("bf16") or found.has("fp16"),
    )


def _has_whole_experts(found: _Arguments, degree: int) -> bool:
    """Return whether the devices of a tensor-parallel group have whole experts.

    An expert-parallel group has ranks that follow each other, those of tensor-parallel groups first
    if the experts' own tensor degree is 1; by default it is that of all layers.
    """
    size, inside = "expert-model-parallel-size", "expert-tensor-parallel-size"
    experts, tensor = found.number(size) or 1, found.number(inside) or degree
    if experts == 1:
        if tensor != degree:
            found.wrong(
                inside,
                f"{tensor}: experts in other shares than the rest are not planned; set it to "
                f"{degree}, or to 1 with --{size} {degree}",
            )
        return False
    if (experts, tensor) != (degree, 1):
        found.wrong(
            size,
            f"{experts} with --{inside} {tensor}: plans give whole experts to the devices of a "
            f"tensor-parallel group, {degree} here; set --{size} and --tensor-model-parallel-size "
            f"to one number and --{inside} to 1, or --{size} to 1",
        )
    if not found.has("sequence-parallel"):
        found.wrong(
            size, "Megatron-LM takes it beside tensor parallelism with --sequence-parallel; add it"
        )
    dispatcher = found.values.get("moe-token-dispatcher-type", "allgather, the default")
    if dispatcher != "alltoall":
        found.wrong(
            "moe-token-dispatcher-type",
            f"{shorten(dispatcher)}: rows go to experts by all-to-all in plans; set it to alltoall",
        )
    if found.has("moe-expert-capacity-factor"):
        found.wrong("moe-expert-capacity-factor", "plans drop no tokens; leave it out")
    return True


def _precision(found: _Arguments) -> Precision | None:
    if found.has("bf16") and found.has("fp16"):
        found.wrong("fp16", "--bf16 is given as well; give one of them")
    return "bfloat16" if found.has("bf16") else "float16" if found.has("fp16") else None


def _gradient_precision(found: _Arguments) -> GradientPrecision | None:
    """Megatron-LM sums gradients in float32 with --bf16, and with --fp16 only if it is told to."""
    float32 = "accumulate-allreduce-grads-in-fp32"
    in_float32, in_bf16 = found.has(float32), found.has("grad-reduce-in-bf16")
    if in_float32 and in_bf16:
        found.wrong("grad-reduce-in-bf16", f"--{float32} is given as well; give one of them")
    if in_float32 or (found.has("bf16") and not in_bf16):
        return "float32"
    return "weights" if in_bf16 or found.has("fp16") else None


def _recompute_blocks(found: _Arguments) -> int | None:
    """Return how many blocks of every stage run again; None for all."""
    granularity = found.values.get("recompute-granularity")
    method, count = found.values.get("recompute-method"), found.number("recompute-num-layers")
    if granularity not in (None, "full", "selective"):
        found.wrong("recompute-granularity", f"{shorten(granularity)}: expected full or selective")
    if found.has("checkpoint-activations"):  # Of Megatron-DeepSpeed.
        if found.number("checkpoint-num-layers") not in (None, 1):
            found.wrong(
                "checkpoint-num-layers", "plans keep what every block starts from; set it to 1"
            )
        return None
    if granularity != "full":
        return 0
    if method not in ("uniform", "block") or count is None:
        found.wrong(
            "recompute-granularity",
            "full needs --recompute-method uniform or block, and --recompute-num-layers; add them",
        )
    elif method == "uniform" and count > 1:
        found.wrong(
            "recompute-num-layers",
            f"{count}: plans keep what every block starts from, not one in {count}; set it to 1",
        )
    return None if method == "uniform" else count


def _is_zero_1(found: _Arguments) -> bool:
    """Return whether pipelines share the optimizer's state; DeepSpeed's take stages 0 and 1."""
    text = found.values.get("zero-stage", "0")
    if text not in ("0", "1"):
        found.wrong(
            "zero-stage",
            f"{shorten(text)}: expected 0, or 1 for an optimizer's state that pipelines share; "
            "gradients and parameters are whole in every pipeline",
        )
    return text == "1"


def _recomputes_attention(found: _Arguments) -> bool:
    """Return whether the core of attention runs again: ``core_attn``, the default module."""
    granularity = found.values.get("recompute-granularity")
    if found.has("recompute-activations") and granularity == "full":
        found.wrong("recompute-activations", "is selective, but --recompute-granularity is full")
    if not found.has("recompute-activations") and granularity != "selective":
        return False
    modules = found.values.get("recompute-modules", _CORE)
    if modules != _CORE:
        found.wrong(
            "recompute-modules",
            f"{shorten(modules)}: of selective recomputation plans have {_CORE} alone, the core of "
            f"attention; set it to {_CORE}, or use --recompute-granularity full",
        )
    return True


# --- stages ---------------------------------------------------------------------------------------


class _Stages:
    """How blocks are dealt out to stages.

    Args:
        found: the arguments, which note what Megatron-LM refuses.
        size: pipeline ranks.
    """

    def __init__(self, found: _Arguments, size: int) -> None:
        for names in _EXCLUDING:
            given = [name for name in names if found.has(name)]
            if len(given) > 1:
                rest = " or ".join(f"--{name}" for name in given[1:])
                found.wrong(given[0], f"Megatron-LM does not take it with {rest}; give one of them")
        self._source, self._size = found.file.source, size
        self._layout = _given_layout(found, size)
        self._numbers = {name: found.number(name) for name in _NUMBERS}
        self._embedding, self._loss = found.has(_EMBEDDING), found.has(_LOSS)
        self._ahead = found.number(_AHEAD) or 0
        self.overlaps = not found.has("no-overlap-p2p-communication")
        """Whether messages overlap where stages are interleaved."""

    def divide(self, graph: LayerGraph) -> Division:
        """Return the layers of every stage of a model.

        Raises:
            PipeplanError: if its blocks cannot be dealt out so.
        """
        blocks = len(block_stack(graph).blocks)
        if (told := self._numbers[_BLOCKS]) not in (None, blocks):
            raise PipeplanError(
                f"{self._source}: --{_BLOCKS} {told}: the model has {blocks} blocks; make them "
                "equal"
            )
        stages = self._layout or stages_of_counts(self._counts(blocks), self._ahead)
        chunks = len(stages) // self._size
        self._require_prediction(stages)
        if chunks > 1 and self._size <= (1 if self.overlaps else 2):
            why = "" if self.overlaps else " and --no-overlap-p2p-communication"
            raise PipeplanError(
                f"{self._source}: --pipeline-model-parallel-size {self._size}: Megatron-LM does "
                f"not interleave {chunks} stages a rank on as many ranks{why}; use more ranks, or "
                "one stage a rank"
            )
        return divide_by_symbols(graph, [row for row in stages if row], self._source)

    @property
    def empty(self) -> tuple[int, ...]:
        """Stages without a layer, which hand on what they receive."""
        return tuple(number for number, row in enumerate(self._layout or ()) if not row)

    def table(self, stages: int, share: int) -> ScheduleTable | None:
        """Return the order of ranks, where it is not that of the schedule's name.

        So it is with another number of microbatches in turn than there are ranks, and with empty
        stages, which keep their place in the order and run nothing.

        Args:
            stages: with layers.
            share: microbatches of a pipeline.

        Raises:
            PipeplanError: if Megatron-LM does not interleave so many microbatches.
        """
        count = stages + len(self.empty)
        turn = (self._numbers[_TURN] or self._size) if count > self._size else share
        rest = share % turn
        if count > self._size and (not self._size <= turn <= share or 0 < rest < self._size):
            raise PipeplanError(
                f"{self._source}: {plural(share, 'microbatch', 'es')} of each pipeline, {turn} in "
                f"turn, on {self._size} pipeline ranks: Megatron-LM's interleaved 1F1B takes "
                f"{_working(share, turn, self._size)}; change --global-batch-size or --{_TURN}"
            )
        if not self.empty and self._size in (count, turn):
            return None
        held = [number for number in range(count) if number not in self.empty]
        rounds = [range(first, min(first + turn, share)) for first in range(0, share, turn)]
        each = 1 if count == self._size else 2
        rows = []
        for rank in range(self._size):
            ahead = (count // self._size - 1) * turn + each * (self._size - 1 - rank)
            order = in_turn(range(rank, count, self._size), rounds, ahead)
            rows.append(
                tuple(op._replace(stage=held.index(op.stage)) for op in order if op.stage in held)
            )
        return ScheduleTable(tuple(rows), f"1F1B, {turn} microbatches in turn")

    def _require_prediction(self, stages: tuple[str, ...]) -> None:
        """Refuse multi-token prediction of another number, or not in the last stage of a rank."""
        found = sum(row.count("m") for row in stages)
        if found != self._ahead:
            raise PipeplanError(
                f"{self._source}: --mtp-num-layers {self._ahead}: the layout has {found} m; make "
                "them equal"
            )
        early = [number for number, row in enumerate(stages[: -self._size]) if "m" in row]
        if early:
            raise PipeplanError(
                f"{self._source}: --{_LAYOUT}: m is in stage {early[0]}, but Megatron-LM has it in "
                f"the last stage of a rank, one of the last {self._size}; move it there"
            )

    def _counts(self, blocks: int) -> list[int]:
        """Return the number of blocks of every stage, as ``get_num_layers_to_build`` does."""
        first, last, depth = (self._numbers[name] for name in (_FIRST, _LAST, _EACH))
        of_rank: list[int | None] = [None] * self._size
        of_rank[0] = first
        of_rank[-1] = of_rank[-1] if last is None else last
        left = blocks + self._embedding + self._loss - sum(row or 0 for row in of_rank)
        each, rest = divmod(left, of_rank.count(None)) if None in of_rank else (0, left)
        numbers = [each if row is None else row for row in of_rank]
        chunks = max(each // depth, 1) if depth else self._numbers[_CHUNKS] or 1
        is_uneven = depth is not None and each != depth * chunks
        if rest or is_uneven or any(row < 1 or row % chunks for row in numbers):
            raise PipeplanError(
                f"{self._source}: {plural(blocks, 'block')} cannot be dealt out equally to "
                f"{plural(self._size * chunks, 'stage')} on {plural(self._size, 'pipeline rank')}; "
                f"{self._remedy(blocks)}, or give --{_LAYOUT}"
            )
        rows = [number // chunks for _ in range(chunks) for number in numbers]
        rows[0] -= self._embedding
        rows[-1] -= self._loss
        return rows

    def _remedy(self, blocks: int) -> str:
        """Return the numbers of ranks that divide the blocks, or what to change instead."""
        counted = blocks + self._embedding + self._loss
        if not any(self._numbers[name] for name in (_FIRST, _LAST, _EACH, _CHUNKS)):
            ranks = [str(n) for n in range(2, counted + 1) if counted % n == 0]
            if ranks:
                return f"--pipeline-model-parallel-size {', '.join(ranks)} would do"
        return "change --pipeline-model-parallel-size or the virtual stages"


def _working(share: int, turn: int, size: int) -> str:
    """Return the nearest numbers of microbatches that are interleaved."""
    if turn < size:
        return f"at least {size} in turn"
    works = [n for n in range(turn, share + 2 * turn) if not 0 < n % turn < size]
    near = sorted(works, key=lambda n: abs(n - share))[:2]
    return " or ".join(map(str, sorted(near))) + " microbatches"


def _given_layout(found: _Arguments, size: int) -> tuple[str, ...] | None:
    """Return the stages of a layout, or None; what is wrong with it is noted."""
    text = found.values.get(_LAYOUT)
    if text is None:
        return None
    try:
        stages = parse_layout(text, f"{found.file.source}: --{_LAYOUT}")
    except PipeplanError as error:
        found.file.problems += error.problems
        return None
    if len(stages) % size:
        found.wrong(
            _LAYOUT, f"{plural(len(stages), 'stage')} on {size} pipeline ranks; make it a multiple"
        )
    return stages


# --- export ---------------------------------------------------------------------------------------

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
_MOVE = "move the cut in the plan's stages and run `pipeplan simulate PLAN -o PLAN`"


class _Form(NamedTuple):
    """A plan in Megatron-LM's terms.

    Attributes:
        stack: embedding, blocks and head.
        stages: symbols of each stage, such as ``Ett``.
        pipelines: the device or group of each pipeline rank, for each pipeline.
    """

    stack: BlockStack
    stages: tuple[str, ...]
    pipelines: tuple[StageDevices, ...]

    @property
    def pipeline_size(self) -> int:
        """Ranks of a pipeline."""
        return len(self.pipelines[0])

    @property
    def order(self) -> str:
        """The schedule that Megatron-LM runs."""
        return "interleaved 1F1B" if len(self.stages) > self.pipeline_size else "1F1B"


def export(plan: Plan) -> Exported:
    """Return a plan as ``megatron.sh``: the layout of its stages, with the other arguments.

    Args:
        plan: verified.

    Raises:
        PipeplanError: with every reason why Megatron-LM cannot run its stages.
    """
    form = _form(plan)
    flags, layers, notes = _recomputed(plan, form.stack)
    theirs = _run_by_megatron(plan, form, layers)
    ranks = ranks_of(plan, form.pipelines)
    lines = [*_flags(plan, form), *flags]
    lines += _UNTIED if _has_untied_head(plan, form.stack) else ()
    script = _SCRIPT.format(
        model=shorten(plan.model.name),
        cluster=shorten(plan.cluster.name),
        ranks="".join(f"#   rank {i}: {_in_a_comment(name)}\n" for i, name in enumerate(ranks)),
        flags="".join(f"    {line}\n" for line in lines),
    )
    return Exported(
        {FILE: script},
        _use(plan, form, len(ranks)),
        (
            *order_notes("Megatron", form.order, plan, theirs),
            *notes,
            *_notes(plan, theirs, ranks),
            *split_notes(plan, "Megatron-LM pads the vocabulary to a multiple and splits it"),
        ),
    )


def _flags(plan: Plan, form: _Form) -> Iterator[str]:
    """Yield the arguments of layers, degrees, batch, gradients and the optimizer's state."""
    job, parallel = plan.job, plan.tensor_parallel
    yield f"--num-layers {len(form.stack.blocks)}"
    if parallel is not None:
        yield f"--tensor-model-parallel-size {parallel.degree}"
        yield from ["--sequence-parallel"] if parallel.sequence else []
    yield f"--pipeline-model-parallel-size {form.pipeline_size}"
    yield f'--{_LAYOUT} "{render_layout(form.stages)}"'
    if form.stack.prediction:
        yield f"--{_AHEAD} {len(form.stack.prediction)}"
    yield f"--micro-batch-size {job.samples_per_microbatch}"
    yield f"--global-batch-size {job.samples_per_microbatch * plan.microbatches}"
    if len(form.pipelines) > 1:
        yield from ["--use-distributed-optimizer"] if job.shards_state else []
        yield from ["--overlap-grad-reduce"] if plan.overlaps else []
    if sums_in_float32(job):
        yield "--accumulate-allreduce-grads-in-fp32"
    elif job.precision == "bfloat16":
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


def _use(plan: Plan, form: _Form, ranks: int) -> tuple[str, ...]:
    degrees = {"tensor": plan.degree, "pipeline": form.pipeline_size, "data": len(form.pipelines)}
    sizes = " x ".join(f"{k} {n}" for k, n in degrees.items() if n > 1 or k == "pipeline")
    shown = "" if plan.degree == len(form.pipelines) == 1 else f" ({sizes})"
    return (
        f"in the script that starts Megatron-LM on {ranks} ranks{shown}: "
        f'source FOLDER/{FILE}, then add "${{PIPEPLAN_ARGS[@]}}" to its arguments',
        "model, sequence length, precision, optimizer and data remain your own arguments; remove "
        "other flags that divide the pipeline",
    )


# --- stages and ranks of an export ----------------------------------------------------------------


def _form(plan: Plan) -> _Form:
    """Return blocks, stages and ranks of a verified plan.

    Raises:
        PipeplanError: with every reason why Megatron-LM cannot run such stages.
    """
    problems: list[str] = []
    stack, by_pipeline = None, tuple[StageDevices, ...]()
    try:
        stack = block_stack(LayerGraph.from_record(plan.model.graph))
        problems += _symbol_problems(plan, stack)
    except PipeplanError as error:
        problems += error.problems
    try:
        by_pipeline = devices_by_replica(plan)
        problems += _rank_problems(plan)
    except PipeplanError as error:
        problems += error.problems
    problems += split_problems(plan, "Megatron-LM")
    if stack is None or problems:
        raise PipeplanError(f"megatron: {problem}" for problem in problems)
    size = len(set(by_pipeline[0]))
    symbols = _symbols(stack, plan)
    if "m" in "".join(symbols[:-size]):
        raise PipeplanError(
            "megatron: multi-token prediction is not in the last stage of its rank, where "
            f"Megatron-LM has it; {_MOVE}"
        )
    return _Form(stack, symbols, tuple(devices[:size] for devices in by_pipeline))


def _symbols(stack: BlockStack, plan: Plan) -> tuple[str, ...]:
    """Return the stages' symbols, with each block where its first layer is."""
    stage_of, rows = stage_of_layer(plan), [""] * len(plan.stages)
    rows[0] = "E"
    for symbol, blocks in (("t", stack.blocks), ("m", stack.prediction)):
        for block in blocks:
            rows[stage_of[block.layers[0]]] += symbol
    rows[-1] += "L"
    return tuple(rows)


def _symbol_problems(plan: Plan, stack: BlockStack) -> Iterator[str]:
    """Yield layers that are in another stage than their symbol, and the nearest layout.

    A block is where its first layer is. Data flow keeps the blocks of a verified plan in order.
    """
    stage_of = stage_of_layer(plan)
    ahead = tuple(layer for block in stack.prediction for layer in block.layers)
    parts = [
        ("E is the whole embedding", stack.before, 0),
        *(("t is a whole block", row.layers, stage_of[row.layers[0]]) for row in stack.blocks),
        *(("m is all multi-token prediction", ahead, stage_of[name]) for name in ahead[:1]),
        ("L is the whole head and loss", stack.after, len(plan.stages) - 1),
    ]
    is_whole = True
    for meaning, layers, expected in parts:
        away = [
            f"{name} in stage {stage_of[name]}" for name in layers if stage_of[name] != expected
        ]
        if away:
            is_whole = False
            yield (
                f"{', '.join(away)}: {meaning} ({', '.join(layers)}), in stage {expected} of the "
                f"layout; {_MOVE}"
            )
    symbols = _symbols(stack, plan)
    if not is_whole and all(symbols):
        yield (
            "the nearest layout, to be simulated as a plan: pipeplan adopt MODEL … "
            f"--stages '{render_layout(symbols)}'"
        )


def _rank_problems(plan: Plan) -> Iterator[str]:
    """Yield why stages are not on pipeline rank i mod PP, or microbatches cannot be shared out."""
    groups = [frozenset(stage.devices) for stage in plan.stages]
    named = [compress_devices(sorted(group)) for group in groups]
    stages, size, replicas = len(groups), len(set(groups)), len(groups[0])
    if len(frozenset[str]().union(*groups)) < size * replicas:
        i, j = next(
            (i, j)
            for i, j in combinations(range(stages), 2)
            if groups[i] != groups[j] and groups[i] & groups[j]
        )
        yield (
            f"stage {i} is on {named[i]}, stage {j} on {named[j]}: replicas of a pipeline rank "
            "hold the same stages; plan again with `pipeplan plan … --sync semi_decentralized`, "
            "whose pipelines keep to themselves"
        )
        return
    remedy = (
        "plan again with max_stages_per_device = 1 in the job, or give ranks their stages in turn "
        "with `pipeplan adopt --stages`"
    )
    wrong = [i for i, group in enumerate(groups) if group != groups[i % size]]
    share, rest = divmod(plan.microbatches, replicas)
    if wrong:
        first = wrong[0]
        yield (
            f"stage {first} is on {named[first]}{and_more(len(wrong) - 1, 'stage')}: Megatron puts "
            f"stage i on pipeline rank i % {size}, stage {first} where stage {first % size} is, on "
            f"{named[first % size]}; {remedy}"
        )
    elif stages % size:
        yield f"{stages} stages on {size} pipeline ranks: every rank holds equally many; {remedy}"
    elif stages > size == 1:
        yield (
            f"all {stages} stages are on {named[0]}: interleaving needs two pipeline ranks at "
            "least; merge the stages into one"
        )
    elif rest or not share:
        yield (
            f"job.microbatches: {plan.microbatches} cannot be shared out equally among {replicas} "
            f"pipelines; set it to a multiple of {replicas}"
        )
    elif stages > size and share % size:
        each = f", {share} for each of {replicas} pipelines" if replicas > 1 else ""
        yield (
            f"job.microbatches: {plan.microbatches}{each}: Megatron's interleaved 1F1B asks for a "
            f"multiple of the {size} pipeline ranks; set it to a multiple of {size * replicas} and "
            "plan again"
        )


# --- what Megatron-LM does otherwise --------------------------------------------------------------


class _Recomputed(NamedTuple):
    """The flags of recomputation, the layers of each stage that run again, notes on others."""

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
    held = [
        [block.layers for block in stack.blocks if set(stage.layers).issuperset(block.layers)]
        for stage in plan.stages
    ]
    number = max(
        sum(not set(stage.recompute).isdisjoint(block) for block in row)
        for stage, row in zip(plan.stages, held, strict=True)
    )
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
        flags = (
            "--recompute-granularity full",
            f"--recompute-method {'uniform' if is_all else 'block'}",
            f"--recompute-num-layers {1 if is_all else number}",
        )
    layers = tuple(tuple(layer for block in row[:number] for layer in block) for row in held)
    ends, notes = {*stack.before, *stack.after}, []
    if left := [name for stage in plan.stages for name in stage.recompute if name in ends]:
        notes.append(f"Megatron recomputes blocks only: {', '.join(left)} keep what they need")
    rows = zip(plan.stages, layers, strict=True)
    if any(set(stage.recompute) - ends != set(row) for stage, row in rows):
        notes.append(
            f"Megatron recomputes the first {plural(number, 'block')} of every stage, where the "
            "plan chooses its layers one by one; the predicted time and memory count that"
        )
    return _Recomputed(flags, layers, tuple(notes))


def _run_by_megatron(plan: Plan, form: _Form, recompute: Sequence[tuple[str, ...]]) -> Timeline:
    """Simulate the same stages in Megatron-LM's own order, with other layers recomputed."""
    size = form.pipeline_size
    devices = [
        tuple(pipeline[stage.index % size] for pipeline in form.pipelines) for stage in plan.stages
    ]
    rows = zip(plan.stages, devices, recompute, strict=True)
    pipeline = place(plan.problem, [StageSpec(row[0].layers, *row[1:]) for row in rows])
    pipelines = list(zip(*devices, strict=True))
    rule = WHOLE[form.order.lower()]
    return simulate(pipeline, orders_of_pipelines(pipeline, pipelines, rule))


def _notes(plan: Plan, theirs: Timeline, ranks: Sequence[str]) -> Iterator[str]:
    """Yield notes on memory, synchronisation, and ranks that are not grouped by node."""
    sharded = ", or shard the optimizer (--use-distributed-optimizer)"
    for device in theirs.overflow_bytes:
        yield (
            f"Megatron's order holds {format_bytes(theirs.peak_memory_bytes[device])} on {device}, "
            f"which has {format_bytes(theirs.pipeline.capacity_bytes(device))}: expect it to run "
            "out of memory; recompute more or use smaller microbatches"
            f"{'' if plan.job.shards_state else sharded}"
        )
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
    nodes = [node for node, _ in groupby(ranks, node_of)]
    if len(set(nodes)) < len(nodes):
        yield (
            f"in Megatron-LM's order the ranks are on {compress_devices(ranks)}: they are not "
            "grouped by node, so use a launcher that can place each rank (a rankfile, or one "
            "torchrun per device)"
        )
