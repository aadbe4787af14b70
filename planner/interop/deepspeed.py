"""DeepSpeed: its partitions of layers as stages of plans, and plans as a PipelineModule.

The order is its own: 1F1B (``TrainSchedule`` in ``runtime/pipe``) with one stage a device and as
many replicas of each. Tensor-parallel groups are the innermost dimension of its topology; layers
split themselves.

Checked against DeepSpeed 0.19.8. Partitions are those of ``PipelineModule._partition_layers``
(``runtime/pipe/module.py``, with ``runtime/utils.py``) over the list that Megatron-DeepSpeed makes
(``GPTModelPipe`` in ``megatron/model/gpt_model.py``): a conversion of types, the embedding, a
transposition, the blocks, a transposition, the norm, the head, and with 16 bits a conversion again.
The fork of github.com/deepspeedai has no transpositions, and always partitions by
``type:transformer``, so that these do not matter there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from planner.costs.gradients import sums_in_float32
from planner.costs.placement import place_plan
from planner.errors import PipeplanError
from planner.interop.division import Division
from planner.interop.exported import (
    Exported,
    crossing,
    devices_by_replica,
    loss_problems,
    order_notes,
    overfull,
    precision_problems,
    ranks_of,
    reduction_notes,
    stage_table,
    sync_notes,
    tied_across_stages,
)
from planner.model.blocks import LOSS, block_stack
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.schedules.whole import one_forward_one_backward
from planner.simulation.simulator import simulate
from planner.units import and_more, plural

PARTITION_METHOD = "pp-partition-method"
"""The argument of Megatron-DeepSpeed that names a method."""


def uniform_parts(count: int, parts: int) -> list[int]:
    """Return where each part of equal numbers of entries begins, and the end.

    The first parts have one more where the entries are no multiple; with fewer entries than parts
    the last parts are empty.
    """
    each, more = divmod(count, parts)
    return [0, *accumulate(each + (part < more) for part in range(parts))]


def balanced_parts(weights: Sequence[int], parts: int) -> list[int]:
    """Return where each part of about equal weight begins, and the end.

    DeepSpeed extends one partition of each prefix by a part: the one with the smallest difference
    between heaviest and lightest part, of equal ones that with the latest cut. That is not always
    the smallest difference of all.
    """
    count, until = len(weights), [0, *accumulate(weights)]
    if count <= parts:
        return uniform_parts(count, parts)
    # The heaviest and the lightest part of the partition of each prefix.
    best: dict[int, tuple[int, int]] = {0: (0, until[-1] + 1)}
    cuts: list[dict[int, int]] = []
    for _ in range(parts):
        extended: dict[int, tuple[int, int]] = {}
        cut_of: dict[int, int] = {}
        for end in range(1, count + 1):
            for cut, (heaviest, lightest) in best.items():
                part = until[end] - until[cut]
                found = max(heaviest, part), min(lightest, part)
                known = extended.get(end)
                if cut < end and (known is None or found[0] - found[1] <= known[0] - known[1]):
                    extended[end], cut_of[end] = found, cut
        best = extended
        cuts.append(cut_of)
    bounds = [count]
    for cut_of in reversed(cuts):
        bounds.append(cut_of[bounds[-1]])
    return bounds[::-1]


class _Entry(NamedTuple):
    """An entry of the list: its class, the layers of the model that it holds, its parameters."""

    kind: str
    layers: tuple[str, ...] = ()
    elements: int = 0


@dataclass(frozen=True)
class DeepSpeedPartition:
    """A method of DeepSpeed for Megatron-DeepSpeed's list of layers.

    Attributes:
        source: the file that says so, for messages.
        method: ``uniform``, ``parameters`` or ``type:NAME|NAME``.
        stages: pipeline stages.
        is_tied: whether the head is the embedding once more.
        converts: whether a conversion to float32 ends the list.
    """

    source: str
    method: str
    stages: int
    is_tied: bool
    converts: bool

    def divide(self, graph: LayerGraph) -> Division:
        """Return the layers of every stage of a model.

        Raises:
            PipeplanError: if the method is unknown, finds no layer, or leaves a stage without any.
        """
        entries = list(self._entries(graph))
        stages = tuple(
            tuple(layer for entry in entries[begin:end] for layer in entry.layers)
            for begin, end in pairwise(self._bounds(entries))
        )
        if empty := [number for number, layers in enumerate(stages) if not layers]:
            raise self._wrong(
                f"of {len(entries)} entries DeepSpeed would leave stage {empty[0]} of "
                f"{len(stages)} without a layer, and train nothing there; use fewer pipeline "
                "ranks, or type:transformer"
            )
        return stages

    def _bounds(self, entries: Sequence[_Entry]) -> list[int]:
        method = self.method.lower()
        if method == "uniform":
            return uniform_parts(len(entries), self.stages)
        if method == "parameters":
            return balanced_parts([entry.elements for entry in entries], self.stages)
        kind, _, names = method.partition(":")
        wanted = names.split("|")
        if kind != "type" or not all(name.isidentifier() for name in wanted):
            raise self._wrong(
                "expected uniform, parameters or type:NAME, such as type:transformer or "
                "'type:transformer|embedding'"
            )
        weights = [int(any(name in entry.kind.lower() for name in wanted)) for entry in entries]
        if sum(weights) < self.stages:
            raise self._wrong(
                f"{plural(sum(weights), 'layer')} of that type for {self.stages} pipeline ranks; "
                "use fewer ranks or another method"
            )
        return balanced_parts(weights, self.stages)

    def _wrong(self, problem: str) -> PipeplanError:
        return PipeplanError(f"{self.source}: --{PARTITION_METHOD} {self.method}: {problem}")

    def _entries(self, graph: LayerGraph) -> Iterator[_Entry]:
        """Yield the entries; the head is the last layer with parameters and what follows it."""

        def entry(kind: str, layers: tuple[str, ...]) -> _Entry:
            held = graph.parameters_of(layers)
            return _Entry(kind, layers, sum(row.elements for row in held if row.trainable))

        stack = block_stack(graph)
        held = [place for place, name in enumerate(stack.after) if graph.layers[name].parameters]
        norm, head = stack.after[: max(held, default=0)], stack.after[max(held, default=0) :]
        embedding = entry("EmbeddingPipe", stack.before)
        yield _Entry("function")
        yield embedding
        yield _Entry("function")
        yield from (entry("ParallelTransformerLayerPipe", block.layers) for block in stack.blocks)
        yield _Entry("function")
        if norm:
            yield entry("LayerNorm", norm)
        yield embedding._replace(layers=head) if self.is_tied else entry("LMHeadPipe", head)
        if self.converts:
            yield _Entry("function")


# --- export ---------------------------------------------------------------------------------------

_TEXT = '''\
"""A pipeline partition for DeepSpeed, written by `pipeplan export`."""

from deepspeed.pipe import PipelineModule
{imports}
MODEL = {model}
LAYERS = [{layers}]
"""What each entry of the list of layers is, in its order; the loss is none of them."""
PARTS = {parts}
"""Stage s holds layers PARTS[s] to PARTS[s + 1] - 1."""
RECOMPUTE = frozenset({recompute})
"""Indices of the layers that run again in the backward; ds_config.json switches that on."""
{sizes}

class PlannedPipelineModule(PipelineModule):
    """A PipelineModule with the stages of the plan.

    Args:
        layers: layers or LayerSpecs, one for each of LAYERS.
        options: of PipelineModule, such as loss_fn; not num_stages, topology, partition_method.
    """

    def __init__(self, layers, **options):
        layers = list(layers)
        if len(layers) != len(LAYERS):
            raise ValueError(
                f"the plan of {{MODEL!r}} has {{len(LAYERS)}} layers (LAYERS says which), "
                f"got {{len(layers)}}; give one entry for each"
            )
        super().__init__(layers, {stages}, **options)

    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(PARTS)
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])

    def _is_checkpointable(self, funcs):
        mine = range(self._local_start, self._local_start + len(self.forward_funcs))
        here = {{i for i, func in zip(mine, self.forward_funcs) if any(func is f for f in funcs)}}
        return not RECOMPUTE.isdisjoint(here)
'''


_IMPORTS = "from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology\n"
_SIZES = '''\
PIPELINES = {pipelines}
"""Pipelines side by side (data parallelism)."""
MEMBERS = {members}
"""Ranks of a tensor-parallel group, which split each layer; they follow each other."""
'''
_TOPOLOGY = (
    "topology=PipeModelDataParallelTopology(\n"
    "            num_pp=len(PARTS) - 1, num_mp=MEMBERS, num_dp=PIPELINES\n"
    "        )"
)


def module_text(
    model: str,
    layers: Sequence[str],
    parts: Sequence[int],
    recompute: Sequence[int],
    pipelines: int = 1,
    members: int = 1,
) -> str:
    """Return the text of a Python module that needs only DeepSpeed.

    Names come from a plan, which anyone may have written: each stands in the text as an escaped
    literal of ASCII, never as code.

    Args:
        model: its name.
        layers: of all stages.
        parts: where each stage begins, and the number of layers.
        recompute: indices of layers.
        pipelines: side by side; they matter where there are groups.
        members: ranks of a tensor-parallel group.
    """
    rows = "".join(f"\n    {name!a}," for name in layers)
    has_groups = members > 1
    return _TEXT.format(
        imports=_IMPORTS if has_groups else "",
        sizes=_SIZES.format(pipelines=pipelines, members=members) if has_groups else "",
        stages=_TOPOLOGY if has_groups else "num_stages=len(PARTS) - 1",
        model=ascii(model),
        layers=f"{rows}\n",
        parts=[int(part) for part in parts],
        recompute=[int(index) for index in recompute],
    )


TOOL = "DeepSpeed"
DTYPES = {
    "float32": {},
    "float16": {"fp16": {"enabled": True}},
    "bfloat16": {"bf16": {"enabled": True}},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # torch's own AdamW: the one that the plan counts, and it needs no compiler.
    "adamw": {"type": "AdamW", "params": {"torch_adam": True}},
    "sgd": {"type": "SGD", "params": {}},
    "sgd_momentum": {"type": "SGD", "params": {"momentum": 0.9}},
}
USE = """\
in your script, with one entry of `layers` for each name of LAYERS in FOLDER/pipeline_module.py:
  folder = "FOLDER"
  sys.path.insert(0, folder)
  from pipeline_module import PlannedPipelineModule
  model = PlannedPipelineModule(layers, loss_fn=loss_fn)
  engine, *_ = deepspeed.initialize(model=model, config=folder + "/ds_config.json")
  engine.train_batch(data_iterator)
start {ranks} processes; rank 0, 1, … must be the devices of "ranks" in FOLDER/stages.json"""
MOST_NAMED = 4


def export(plan: Plan) -> Exported:
    """Return a plan as ``pipeline_module.py``, ``ds_config.json`` and ``stages.json``.

    Args:
        plan: verified.

    Raises:
        PipeplanError: if DeepSpeed cannot run it: every reason.
    """
    problems = [*loss_problems(plan, TOOL), *_problems(plan)]
    try:
        by_pipeline = devices_by_replica(plan)
    except PipeplanError as error:
        raise PipeplanError([*error.problems, *problems]) from None
    count = len(by_pipeline)
    if plan.microbatches % count:
        problems.append(
            f"microbatches: {plan.microbatches} cannot be divided equally among {count} "
            f"pipelines, as {TOOL} requires; plan again with a multiple of {count}"
        )
    if problems:
        raise PipeplanError(problems)
    pipeline = place_plan(plan)
    owner = {  # Microbatches are dealt to pipelines in turn.
        (stage.index, microbatch): by_pipeline[microbatch % count][stage.index]
        for stage in plan.stages
        for microbatch in range(plan.microbatches)
    }
    timeline = simulate(pipeline, one_forward_one_backward(pipeline, owner))
    if full := overfull(timeline):
        raise PipeplanError(
            f"orders: {TOOL} runs 1F1B, and then {row}; reduce memory: smaller microbatches, or "
            "recompute = true"
            for row in full
        )
    layers = [[name for name in stage.layers if name != LOSS] for stage in plan.stages]
    flat = [name for stage in layers for name in stage]
    again = {name for stage in plan.stages for name in stage.recompute}
    module = module_text(
        model=plan.model.name,
        layers=flat,
        parts=[0, *accumulate(map(len, layers))],
        recompute=[index for index, name in enumerate(flat) if name in again],
        pipelines=count,
        members=plan.degree,
    )
    ranks = ranks_of(plan, by_pipeline)
    return Exported(
        files={
            "pipeline_module.py": module,
            "ds_config.json": json.dumps(_config(plan, count), indent=1) + "\n",
            "stages.json": stage_table(plan, ranks),
        },
        use=tuple(USE.format(ranks=len(ranks)).splitlines()),
        notes=(*order_notes(TOOL, "1F1B", plan, timeline), *_notes(plan)),
    )


def _problems(plan: Plan) -> Iterator[str]:
    """Yield what DeepSpeed cannot run: several stages a device, skips, precisions."""
    held: dict[str, list[int]] = {}
    for stage in plan.stages:
        for device in stage.devices:
            held.setdefault(device, []).append(stage.index)
    if several := [(device, stages) for device, stages in held.items() if len(stages) > 1]:
        device, stages = several[0]
        yield (
            f"stages[{stages[0]}].devices: {device!r} holds the stages "
            f"{', '.join(map(str, stages))}{and_more(len(several) - 1, 'device')}, but {TOOL} has "
            "one stage per rank; plan again with max_stages_per_device = 1 in the job"
        )
    for cut, tensors in enumerate(crossing(plan)):
        last, first = plan.stages[cut].layers[-1], plan.stages[cut + 1].layers[0]
        for tensor in tensors:
            if tensor.producer != last or tensor.users != (first,):
                yield (
                    f"stages[{cut}].layers: tensor {tensor.name!r} goes from layer "
                    f"{tensor.producer!r} to {', '.join(map(repr, tensor.users[:3]))} across the "
                    f"cut between {last!r} and {first!r}, but a {TOOL} layer receives only the "
                    "output of the previous one; cut where only neighbouring layers are connected"
                )
    job = plan.job
    yield from precision_problems(plan, TOOL, tuple(DTYPES), ", ".join(DTYPES))
    if sums_in_float32(job) and (job.precision == "float16" or not job.shards_state):
        yield (
            f"job.gradient_precision: float32 gradients of {job.precision} weights, which {TOOL} "
            'sums with bfloat16 and ZeRO-1 alone; plan again with gradient_precision = "weights", '
            'or with precision = "bfloat16" and shard_optimizer = true'
        )


def _config(plan: Plan, pipelines: int) -> dict[str, Any]:
    """Return the configuration of batch, precision, optimizer and shared optimizer state."""
    job, optimizer = plan.job, OPTIMIZERS[plan.job.optimizer]
    params = {"lr": job.learning_rate, **optimizer["params"]}
    config: dict[str, Any] = {
        "train_batch_size": plan.microbatches * job.samples_per_microbatch,
        "train_micro_batch_size_per_gpu": job.samples_per_microbatch,
        "gradient_accumulation_steps": plan.microbatches // pipelines,
        **DTYPES[job.precision],
        "optimizer": {"type": optimizer["type"], "params": params},
    }
    if sums_in_float32(job):  # By default it sums and reduces them in the type of the weights.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    if job.shards_state and (pipelines > 1 or sums_in_float32(job)):
        config["zero_optimization"] = {"stage": 1}
        if job.optimizer.startswith("sgd"):  # DeepSpeed 0.19.8 refuses it without.
            config["zero_allow_untested_optimizer"] = True
    if job.sequence_parallel:
        # What a device of a group hands on is its own share; it is not to be divided again.
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if any(stage.recompute for stage in plan.stages):
        again = {"activation_checkpoint_interval": 1, "use_reentrant": False}
        config["pipeline"] = {**config.get("pipeline", {}), **again}
    return config


def _notes(plan: Plan) -> Iterator[str]:
    if any(LOSS in stage.layers for stage in plan.stages):
        yield f"the layer {LOSS!r} is no entry of `layers`: give it as loss_fn"
    for name in tied_across_stages(plan):
        yield f"parameter {name!r} is used by several stages: use TiedLayerSpec for its layers"
    yield from _entry_notes(plan)
    if plan.degree > 1:
        yield (
            f"{TOOL} splits no layers over the {plan.degree} ranks of a tensor-parallel group: "
            "give `layers` whose modules do (Megatron-DeepSpeed's ColumnParallelLinear, "
            "RowParallelLinear and VocabParallelEmbedding, or your own), and initialize them with "
            "PipeModelDataParallelTopology's groups; `pipeplan trace --split` says how the plan "
            "counts each layer"
        )
    yield from reduction_notes(plan, f"{TOOL} reduces them after all backwards")
    yield from sync_notes(plan, TOOL)


def _entry_notes(plan: Plan) -> Iterator[str]:
    """Yield a note on layers that need more than the previous output."""
    order = [name for stage in plan.stages for name in stage.layers]
    given: dict[str, list[str]] = {name: [] for name in order}
    for tensor in plan.model.graph.boundaries:
        for user in tensor.users:
            given[user].append(tensor.producer)
    taken = [
        _taken(name, before, given[name])
        for before, name in pairwise(order)
        if set(given[name]) != {before}
    ]
    if taken:
        yield (
            f"{_some(taken, '; ')}: an entry of `layers`, as loss_fn, is given only what the one "
            "before it returns, so those before it return tuples to hand on what it needs"
        )


def _taken(name: str, before: str, makers: Sequence[str]) -> str:
    if not makers:
        return f"{name!r} takes nothing of {before!r} before it"
    how = "together with" if before in makers else "instead of"
    others = dict.fromkeys(maker for maker in makers if maker != before)
    names = _some(list(map(repr, others)), ", ")
    return f"{name!r} takes what {names} made, {how} the output of {before!r}"


def _some(phrases: Sequence[str], between: str) -> str:
    more = f"{between}and {len(phrases) - MOST_NAMED} more" if len(phrases) > MOST_NAMED else ""
    return between.join(phrases[:MOST_NAMED]) + more
