"""Building the plan's model, if the user allows it, and checking that it is the planned one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from executor.launch.partial_model import Needed, build_partially
from planner.errors import PipeplanError
from planner.job import LOSSES
from planner.model.graph_record import Boundary, GraphRecord, Parameter
from planner.plan.plan import Plan
from planner.tracing.export import ExportedStep, export_step
from planner.tracing.factory import (
    Loss,
    batch_at,
    build,
    example_batch,
    import_factory,
    import_loss,
)
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.hugging_face import is_configuration_file
from planner.tracing.layers import LayerAssignment, assign_layers
from planner.tracing.trace import parameters_of
from planner.units import plural

Factory = Callable[..., nn.Module]


def allowed_factory(plan: Plan, named: str | Factory | None) -> Factory:
    """The factory to build the model with.

    A plan is data: its factory is imported only if it is one of the zoo's or the user named the
    same one. That holds for ``hf:`` models too: what their configuration can make the library do
    is its authors' to say. A configuration file may lie elsewhere than when the plan was made; its
    layers are compared with the plan's like any model's.

    Raises:
        PipeplanError: if the plan names a factory that nobody allowed.
    """
    if callable(named):
        return named
    recorded = plan.model.factory
    if named is None:
        if recorded is None:
            raise PipeplanError(
                "the plan does not say how its model is built; name it: --model module:factory"
            )
        if recorded not in _zoo().values():
            raise PipeplanError(
                f"the plan's model is {recorded!r}, which is not in Pipeplan's own package models "
                "(models.ZOO, of a checkout: installations have none); plans are data and import "
                f"nothing by themselves: if you trust it, add --model {recorded}"
            )
        named = recorded
    elif recorded is not None and not _same_source(named, recorded):
        raise PipeplanError(f"--model {named}: the plan was made for {recorded!r}")
    return import_factory(named)


def _same_source(named: str, recorded: str) -> bool:
    return named == recorded or (is_configuration_file(named) and is_configuration_file(recorded))


def _zoo() -> Mapping[str, str]:
    """The zoo that came with this executor; empty where another package bears its name."""
    ours = Path(__file__).resolve().parents[2] / "models" / "__init__.py"
    found = find_spec("models")
    if found is None or found.origin is None or Path(found.origin).resolve() != ours:
        return {}
    return import_module("models").ZOO  # type: ignore[no-any-return]


def build_model(
    plan: Plan, factory: Factory, seed: int, is_needed: Needed = lambda name: True
) -> nn.Module:
    """The model on the CPU with its initial weights, the same on every rank.

    Args:
        plan: whose arguments and precision count.
        factory: builds it.
        seed: of the weights.
        is_needed: which parameters are to have their values, by name; no others take up memory.
    """

    def make() -> nn.Module:
        return build(factory, plan.model.arguments).train()

    return build_partially(make, seed, is_needed, getattr(torch, plan.job.precision))


def export_planned_model(
    plan: Plan,
    model: nn.Module,
    own_loss: Loss | None = None,
    autocast: torch.dtype | None = None,
) -> tuple[ExportedStep, LayerAssignment]:
    """Export the model and make sure that its layers are the planned ones.

    Args:
        plan: the model's layers, boundaries and parameters.
        model: built by the plan's factory, with its weights on the CPU.
        own_loss: of :func:`executor.launch.model.allowed_loss`.
        autocast: what torch's autocast lowers operations to when it is trained. Boundaries may
            then be of that type; a plan knows the type without.

    Raises:
        PipeplanError: naming the first differences.
    """
    batch = example_batch(model, plan.job)
    step = _exported(plan, model, batch, own_loss)
    differences = structure_differences(plan.model.graph, *step)
    if differences:
        raise PipeplanError(
            f"the model is not the one the plan was made for: {line}; plan again with this model"
            for line in differences
        )
    return step if autocast is None else _exported(plan, model, batch, own_loss, autocast)


def _exported(
    plan: Plan,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    own_loss: Loss | None,
    autocast: torch.dtype | None = None,
    *,
    training: bool = True,
) -> tuple[ExportedStep, LayerAssignment]:
    lowered: AbstractContextManager[None] = nullcontext()
    if autocast is not None:
        lowered = torch.autocast("cpu", autocast, cache_enabled=False)
    with lowered:
        exported = export_step(model, batch, plan.job, own_loss, training=training)
    return exported, assign_layers(exported)


def export_in_evaluation(
    plan: Plan,
    model: nn.Module,
    own_loss: Loss | None = None,
    autocast: torch.dtype | None = None,
) -> tuple[Plan, ExportedStep, LayerAssignment]:
    """Export the model in evaluation mode, with a plan of its forwards alone.

    Layers that only training has, such as dropout, are left out of the stages, and nothing is
    recomputed, offloaded or divided. The model is left in training mode.

    Args:
        plan: as :func:`export_planned_model` has exported the model for.
        model: see there.
        own_loss: see there.
        autocast: see there.

    Raises:
        PipeplanError: naming a layer that training does not have.
    """
    batch = example_batch(model, plan.job)
    exported, layers = _exported(plan, model, batch, own_loss, autocast, training=False)
    model.train()
    found = set(layers.names)
    for name in found.difference(*(stage.layers for stage in plan.stages)):
        raise PipeplanError(
            f"validation: in evaluation mode the model has layer {name!r}, which the plan has not; "
            "let it run in training mode too, or train without [validation]"
        )
    stages = tuple(
        stage.model_copy(
            update={
                "layers": tuple(name for name in stage.layers if name in found),
                "recompute": (),
                "offload": (),
            }
        )
        for stage in plan.stages
    )
    whole = {"shard_parameters": False, "recompute_attention": False}
    job = plan.job.model_copy(update=whole)
    return plan.model_copy(update={"stages": stages, "job": job}), exported, layers


def export_shorter_lengths(
    plan: Plan,
    model: nn.Module,
    own_loss: Loss | None = None,
    autocast: torch.dtype | None = None,
) -> Iterator[tuple[ExportedStep, LayerAssignment]]:
    """Export the model at every length of microbatches but the longest, ascending.

    Args:
        plan: with the job's lengths; nothing is exported if it has one only.
        model: as :func:`export_planned_model` has exported it at the longest.
        own_loss: see there.
        autocast: see there.

    Raises:
        PipeplanError: if layers, or sizes of tensors between them, are not the planned ones.
    """
    lengths = plan.job.lengths
    if lengths is None:
        return
    batch = example_batch(model, plan.job)
    for place, tokens in enumerate(lengths.tokens[:-1]):
        shorter = batch_at(batch, lengths, place)
        step = _exported(plan, model, shorter, own_loss)
        _require_sizes(plan.model.graph, step[1], place, tokens)
        yield step if autocast is None else _exported(plan, model, shorter, own_loss, autocast)


def _require_sizes(graph: GraphRecord, layers: LayerAssignment, place: int, tokens: int) -> None:
    expected = {t.name: t.lengths[place].bytes for t in graph.boundaries}
    values = ((node.name, node.meta["val"]) for node, _, _ in layers.crossing_tensors())
    found = {n: v.numel() * v.element_size() for n, v in values if isinstance(v, Tensor)}
    if tuple(layer.name for layer in graph.layers) != layers.names or found != expected:
        raise PipeplanError(
            f"the model is not the one the plan was made for: at {tokens} tokens it has other "
            "layers, or other tensors between them; plan again with this model"
        )


def allowed_loss(plan: Plan, named: str | Loss | None) -> Loss | None:
    """The function that the plan's loss names, or None where Pipeplan knows the loss itself.

    A plan is data: a ``module:function`` that it holds is imported only if the user names the same
    one, or gives the function.

    Raises:
        PipeplanError: if the plan names a function that nobody allowed, or another one.
    """
    recorded = plan.job.loss
    if recorded in LOSSES:
        if named not in (None, recorded):
            raise PipeplanError(
                f"--loss {_shown(named)}: the plan was made for {recorded!r}; plan again with this "
                "loss in the job file"
            )
        return None
    if named is None:
        raise PipeplanError(
            f"the plan's loss is {recorded!r}; plans are data and import nothing by themselves: if "
            f"you trust it, add --loss {recorded}"
        )
    if callable(named):
        return named
    if named != recorded:
        raise PipeplanError(f"--loss {named}: the plan was made for {recorded!r}")
    return import_loss(plan.job)


def _shown(named: str | Loss | None) -> str:
    return named if isinstance(named, str) else getattr(named, "__name__", repr(named))


def structure_differences(
    expected: GraphRecord, exported: ExportedStep, layers: LayerAssignment
) -> list[str]:
    """Return one line per difference that matters for running a plan; empty if there is none.

    FLOP counts and stash may differ between versions of torch and are not compared.
    """
    names = tuple(layer.name for layer in expected.layers)
    if names != layers.names:
        return [_layer_difference(names, layers.names)]
    gradients = nodes_with_gradient(exported)
    found = parameters_of(exported, layers, gradients)
    problems = [
        *_parameter_differences(expected.parameters, found),
        *_boundary_differences(expected.boundaries, layers, gradients),
    ]
    return problems[:10]


def _layer_difference(planned: Sequence[str], found: Sequence[str]) -> str:
    """Tell how the layers of a model are others than those of its plan."""
    if len(planned) != len(found):
        only = set(planned) ^ set(found)
        first = next(name for name in (*planned, *found) if name in only)
        where = "the plan" if first in planned else "the model"
        return (
            f"it has {plural(len(found), 'layer')}, the plan {len(planned)}; layer {first!r} is "
            f"only in {where}"
        )
    old, new = next(pair for pair in zip(planned, found, strict=True) if pair[0] != pair[1])
    return f"layer {old!r} of the plan is {new!r} in the model; give a renamed module its old name"


def _parameter_differences(
    expected: Sequence[Parameter], found: Sequence[Parameter]
) -> Iterator[str]:
    planned, own = ({p.name: p for p in parameters} for parameters in (expected, found))
    for name in sorted(planned.keys() | own.keys()):
        here, there = own.get(name), planned.get(name)
        if here is None or there is None or here.elements != there.elements:
            yield (
                f"parameter {name!r} has {here.elements if here else 'no'} elements, the plan says "
                f"{there.elements if there else 'none'}"
            )
        elif here.trainable != there.trainable:
            yield f"parameter {name!r} {_gradients(here.trainable)}"


def _boundary_differences(
    expected: Sequence[Boundary], layers: LayerAssignment, gradients: Set[fx.Node]
) -> Iterator[str]:
    planned = {b.name: b for b in expected}
    for node, producer, _ in layers.crossing_tensors():
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            continue
        there = planned.pop(node.name, None)
        shape = (producer, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if there is None or (there.producer, there.shape, there.dtype) != shape:
            yield f"boundary tensor {node.name!r} of layer {producer!r} differs"
        elif (node in gradients) != there.requires_grad:
            yield (
                f"boundary tensor {node.name!r} of layer {producer!r} "
                f"{_gradients(node in gradients)}"
            )
    yield from (f"boundary tensor {name!r} is missing" for name in planned)


def _gradients(has_one: bool) -> str:
    if has_one:
        return "takes a gradient, the plan says it takes none"
    return "takes no gradient (it is frozen or detached), the plan says it takes one"
