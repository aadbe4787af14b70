"""What each runtime can express of a plan: a job's freedoms, narrowed to that.

Exporters (:mod:`planner.interop.exported`) say which plan a tool cannot run and why. Here all plans
are narrowed to a :class:`planner.space.Space`. ``pipeplan``, our own executor, runs them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from planner.errors import PipeplanError, shorten
from planner.job import LOW_PRECISION, Job, Runtime
from planner.model.blocks import LOSS, block_name, block_stack, module_of
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.plan.runtime_rules import RULES, RuntimeRules
from planner.plan.unsupported import FEATURES, Feature, require_without

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
EXPORTS: Mapping[Runtime, str] = {
    "torch": "torch-csv",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
    "deepspeed": "deepspeed",
}
"""The export of each runtime, a name of :data:`planner.interop.exported.TARGETS`."""
LOSSES_IN_ORDER: frozenset[Runtime | None] = frozenset(("torch", "torchtitan"))
"""Runtimes that take the m-th loss to be that of microbatch m."""
Cuts = Callable[[LayerGraph], Iterator[int]]
"""Positions in the chain at which a stage may not begin."""


@dataclass(frozen=True)
class Expressible:
    """What a runtime can express.

    Attributes:
        freedoms: fields of a job that it narrows, with the values it allows.
        forbidden_cuts, never_cut: see :data:`Cuts`, and what they are, for people.
        precisions: it trains in; none: all.
        takes: features of jobs that it runs; no others.
    """

    freedoms: Mapping[str, Any]
    forbidden_cuts: Cuts
    never_cut: str
    precisions: tuple[str, ...] = ()
    takes: tuple[Feature, ...] = ()


def for_runtime(problem: Problem, runtime: str | RuntimeRules | None = None) -> Problem:
    """Return a problem whose plans a runtime can run as they are planned, under its rules.

    Args:
        problem: the model, cluster and job.
        runtime: a name or rules; by default the problem's if they are of the job's runtime.

    Raises:
        PipeplanError: if the runtime cannot run any plan of the model, or of such a job.
    """
    if runtime is None and problem.runtime.expresses == problem.job.runtime:
        runtime = problem.runtime
    runtime = runtime or problem.job.runtime
    if runtime is None:
        return problem
    rules = runtime if isinstance(runtime, RuntimeRules) else rules_of(runtime)
    fields: dict[str, Any] = {"runtime": rules.expresses}
    if rules.expresses in _EXPRESSIBLE:
        able = _EXPRESSIBLE[rules.expresses]
        features = [feature for feature in FEATURES if feature not in able.takes]
        require_without(problem.job, f"a plan for {rules.expresses}", features)
        fields |= _narrowed(problem, rules.expresses, able)
    return replace(problem, job=problem.job.model_copy(update=fields), runtime=rules)


def rules_of(name: str) -> RuntimeRules:
    """Return the rules of a runtime by its name, or those of a file.

    Args:
        name: of :data:`planner.plan.runtime_rules.RULES`, or a path that ends in .toml or .json.

    Raises:
        PipeplanError: listing the known ones, if it is none; naming every wrong field of a file.
    """
    if name.endswith((".toml", ".json")):
        return RuntimeRules.load(name)
    if name not in RULES:
        raise PipeplanError(
            f"runtime: {shorten(name)} is unknown; choose from {', '.join(RULES)}, or name a file "
            "of your own that ends in .toml or .json"
        )
    return RULES[name]


def narrowed_by(runtime: Runtime | None) -> frozenset[str]:
    """Return the fields of a job that a runtime narrows."""
    able = None if runtime is None else _EXPRESSIBLE.get(runtime)
    if able is None:
        return frozenset()
    return frozenset({"cuts", *able.freedoms, *_FREEDOMS.difference(able.takes)})


def _narrowed(problem: Problem, runtime: Runtime, able: Expressible) -> dict[str, Any]:
    """Return the fields of the job that are narrower for a runtime."""
    job = problem.job
    if able.precisions and job.precision not in able.precisions:
        raise PipeplanError(
            f"job.precision: {job.precision!r}, but {runtime} trains in "
            f"{', '.join(able.precisions)}; set one of these in the job"
        )
    fields = {name: _narrower(job, name, value) for name, value in able.freedoms.items()}
    if fields.get("order") == "1f1b" and job.backward == "split":
        raise PipeplanError(
            f'job.backward: "split", but {runtime} runs whole backwards; set it to "any"'
        )
    if job.gradient_precision is None and _sums_as_weights(runtime, job):
        fields["gradient_precision"] = "weights"
    if job.recompute_attention:  # It is selective recomputation there, in place of any other.
        fields["recompute"] = False
    fields["cuts"] = _cuts(problem, able)
    return fields


def _sums_as_weights(runtime: Runtime, job: Job) -> bool:
    """Return whether a runtime sums gradients of 16-bit weights in the weights' own type.

    Plain torch does. DeepSpeed sums them in float32 with bfloat16 and ZeRO-1 alone.
    """
    if job.precision not in LOW_PRECISION:
        return False
    in_float32 = job.precision == "bfloat16" and job.shards_state
    return runtime == "torch" or (runtime == "deepspeed" and not in_float32)


def _narrower(job: Job, name: str, value: Any) -> Any:
    """Return the narrower of a job's value and a runtime's."""
    own = getattr(job, name)
    if name == "min_stages":
        return max(own, value)
    if name == "recompute":
        return value if own is True else own and value and own
    if name == "max_stages_per_device":
        return min(own, value)
    if name == "placement":
        return min(own, value, key=("loop", "loop_or_v", "any").index)
    return value


def _cuts(problem: Problem, able: Expressible) -> tuple[str, ...]:
    """Return the layers before which a stage may begin, of those that the job allows."""
    names, own = tuple(problem.graph.layers), problem.job.cuts
    forbidden = set(able.forbidden_cuts(problem.graph))
    return tuple(
        name
        for position, name in enumerate(names)
        if position and position not in forbidden and (own is None or name in own)
    )


def never_cut(runtime: Runtime | None) -> str | None:
    """Say where a runtime's stages may not begin; None if anywhere."""
    able = None if runtime is None else _EXPRESSIBLE.get(runtime)
    return None if able is None else able.never_cut


def _apart_from_loss(graph: LayerGraph) -> Iterator[int]:
    """Yield cuts that leave the loss outside the last stage, or alone in it."""
    names = tuple(graph.layers)
    if LOSS in names:
        first = names.index(LOSS)
        yield from range(first if first == len(names) - 1 else first + 1, len(names))


def _torchtitan_cuts(graph: LayerGraph) -> Iterator[int]:
    """Yield cuts inside a module, across several tensors, or between tied weights."""
    if reason := inside_another(graph.layers):
        raise PipeplanError(f"torchtitan cannot cut {graph.name!r}: {reason}")
    yield from _apart_from_loss(graph)
    modules: dict[str, list[int]] = {}
    tied: dict[str, list[int]] = {}
    for position, layer in enumerate(graph.record.layers):
        if layer.name != LOSS:
            modules.setdefault(module_of(layer.name), []).append(position)
        for name in layer.parameters:
            if graph.parameters[name].trainable:
                tied.setdefault(name, []).append(position)
    for held in (*modules.values(), *tied.values()):
        yield from range(held[0] + 1, held[-1] + 1)
    crossed = Counter(cut for a, b in _spans(graph) for cut in range(a + 1, b + 1))
    yield from (cut for cut, tensors in crossed.items() if tensors > 1)


def inside_another(layers: Collection[str]) -> str | None:
    """Return why torchtitan cannot cut a model; None if it has blocks at the top level, or none."""
    inside = {module_of(name) for name in layers if block_name(name) not in (None, module_of(name))}
    if not inside or any(block_name(name) == module_of(name) for name in layers):
        return None
    return (
        f"blocks inside {min(inside)!r}, as in Hugging Face's models; plan torchtitan's own model"
    )


def _deepspeed_cuts(graph: LayerGraph) -> Iterator[int]:
    """Yield cuts that a tensor crosses which does not go to the next layer alone."""
    yield from _apart_from_loss(graph)
    for first, last in _spans(graph):
        if last - first > 1:
            yield from range(first + 1, last + 1)


def _megatron_cuts(graph: LayerGraph) -> Iterator[int]:
    """Yield cuts inside the embedding, a block or the head, or between multi-token predictions."""
    stack = block_stack(graph)
    position = {name: index for index, name in enumerate(graph.layers)}
    ahead = tuple(name for block in stack.prediction for name in block.layers)
    for layers in (stack.before, *(b.layers for b in stack.blocks), ahead, stack.after):
        places = [position[name] for name in layers]
        yield from range(min(places, default=0) + 1, max(places, default=0) + 1)


def _spans(graph: LayerGraph) -> Iterator[tuple[int, int]]:
    """Yield the positions of each tensor's producer and of its last user."""
    position = {name: index for index, name in enumerate(graph.layers)}
    for tensor in graph.record.boundaries:
        yield position[tensor.producer], max(position[user] for user in tensor.users)


_GROUPS: Feature = "tensor_parallel"
_FREEDOMS: frozenset[Feature] = frozenset(("shard_optimizer", "shard_parameters", "offload"))
_OF_ITS_OWN_ORDER = {
    "order": "1f1b",
    "backward": "whole",
    "equal_pipelines": True,
    "overlap_reduction": False,
}
_EXPRESSIBLE: Mapping[Runtime, Expressible] = {
    "torch": Expressible(
        {"replication": False, "recompute": False, "overlap_reduction": False},
        _apart_from_loss,
        "before a loss that would be alone in the last stage",
        takes=(_GROUPS,),
    ),
    "torchtitan": Expressible(
        {
            "min_stages": 2,
            "placement": "loop_or_v",
            "equal_pipelines": True,
            "recompute": False,
            "overlap_reduction": False,
        },
        _torchtitan_cuts,
        "inside a module, where several tensors cross, or between layers that share weights",
        ("float32", "bfloat16"),
        takes=(_GROUPS, "shard_optimizer"),
    ),
    "megatron": Expressible(
        {**_OF_ITS_OWN_ORDER, "placement": "loop", "recompute": "blocks"},
        _megatron_cuts,
        "inside the embedding, a block or the head",
        takes=(_GROUPS, "shard_optimizer", "recompute_attention"),
    ),
    "deepspeed": Expressible(
        {**_OF_ITS_OWN_ORDER, "max_stages_per_device": 1},
        _deepspeed_cuts,
        "where a tensor crosses that does not go to the next layer alone",
        ("float32", "float16", "bfloat16"),
        takes=(_GROUPS, "shard_optimizer"),
    ),
}
