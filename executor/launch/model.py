"""Building the plan's model, if the user allows it, and checking that it is the planned one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
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


Exported = tuple[ExportedStep, LayerAssignment]


class PlannedModel:
    """A model that is exported for a plan.

    Args:
        plan: the model's layers, boundaries and parameters.
        model: built by the plan's factory, with its weights on the CPU.
        own_loss: of :func:`executor.launch.model.allowed_loss`.
        autocast: what torch's autocast lowers operations to when it is trained. Boundaries may
            then be of that type; a plan knows the type without.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        own_loss: Loss | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._plan = plan
        self._model = model
        self._own_loss = own_loss
        self._autocast = autocast
        self._batch = example_batch(model, plan.job)

    def export(self) -> Exported:
        """Export the model and make sure that its layers are the planned ones.

        Raises:
            PipeplanError: naming the first differences.
        """
        step = self._exported(self._batch, None)
        differences = structure_differences(self._plan.model.graph, *step)
        if differences:
            raise PipeplanError(
                f"the model is not the one the plan was made for: {line}; plan again with this "
                "model"
                for line in differences
            )
        return self._lowered(step, self._batch)

    def export_shorter(self) -> Iterator[Exported]:
        """Export it at every length of microbatches but the longest, ascending.

        Nothing is exported if all microbatches are of one length.

        Raises:
            PipeplanError: if layers, or sizes of tensors between them, are not the planned ones.
        """
        lengths = self._plan.job.lengths
        if lengths is None:
            return
        for place, tokens in enumerate(lengths.tokens[:-1]):
            shorter = batch_at(self._batch, lengths, place)
            step = self._exported(shorter, None)
            _require_sizes(self._plan.model.graph, step[1], place, tokens)
            yield self._lowered(step, shorter)

    def export_in_evaluation(self) -> tuple[Exported, Plan]:
        """Export it in evaluation mode, with a plan of its forwards alone.

        Layers that only training has, such as dropout, are left out of the stages, and nothing is
        recomputed, offloaded or divided. The model is left in training mode.

        Raises:
            PipeplanError: naming a layer that training does not have.
        """
        exported, layers = self._exported(self._batch, self._autocast, training=False)
        self._model.train()
        stages, found = self._plan.stages, set(layers.names)
        for name in found.difference(*(stage.layers for stage in stages)):
            raise PipeplanError(
                f"validation: in evaluation mode the model has layer {name!r}, which the plan has "
                "not; let it run in training mode too, or train without [validation]"
            )
        rows = (tuple(name for name in stage.layers if name in found) for stage in stages)
        left_out = {"recompute": (), "offload": ()}
        forwards = tuple(
            stage.model_copy(update={"layers": row, **left_out})
            for stage, row in zip(stages, rows, strict=True)
        )
        whole = {"shard_parameters": False, "recompute_attention": False}
        job = self._plan.job.model_copy(update=whole)
        plan = self._plan.model_copy(update={"stages": forwards, "job": job})
        return (exported, layers), plan

    def _lowered(self, step: Exported, batch: Mapping[str, Tensor]) -> Exported:
        """Return what is trained: an export under autocast in place of one without."""
        return step if self._autocast is None else self._exported(batch, self._autocast)

    def _exported(
        self, batch: Mapping[str, Tensor], autocast: torch.dtype | None, *, training: bool = True
    ) -> Exported:
        with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
            job = self._plan.job
            exported = export_step(self._model, batch, job, self._own_loss, training=training)
        return exported, assign_layers(exported)


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
