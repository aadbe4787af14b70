"""Exports of models that all trainings of a launch share, since each takes a second or more.

What an export and the search for gradients find depends on the model's form alone. Each training
gets a graph of its own, with its own model's weights.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from executor.launch import model as launched
from executor.stage.statistics import copied
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.export import ExportedStep, export_step
from planner.tracing.factory import Loss
from planner.tracing.gradients import nodes_with_gradient


class SharedExports:
    """Exports each form of a model once."""

    def __init__(self) -> None:
        self._exported: dict[object, ExportedStep] = {}
        self._gradients: dict[object, frozenset[str]] = {}

    def share(self) -> None:
        """Let all trainings of this process, and of its forks, use these exports."""
        launched.export_step = self.export
        launched.nodes_with_gradient = self.gradients

    def export(
        self,
        model: nn.Module,
        batch: Mapping[str, Tensor],
        job: Job,
        own_loss: Loss | None = None,
        training: bool = True,
    ) -> ExportedStep:
        """Return what :func:`export_step` would."""
        key = (*_form(model, batch, job, own_loss), training)
        if key not in self._exported:
            first = export_step(model, batch, job, own_loss, training=training)
            self._exported[key] = ExportedStep(copied(first.module), first.names)
        exported = _with_weights_of(model, self._exported[key])
        exported.module.meta["form"] = key
        return exported

    def gradients(self, exported: ExportedStep) -> frozenset[fx.Node]:
        """Return what :func:`nodes_with_gradient` would."""
        key = exported.module.meta["form"]
        if key not in self._gradients:
            found = nodes_with_gradient(exported)
            self._gradients[key] = frozenset(node.name for node in found)
        names = self._gradients[key]
        return frozenset(node for node in exported.graph.nodes if node.name in names)


def _form(
    model: nn.Module, batch: Mapping[str, Tensor], job: Job, own_loss: Loss | None
) -> tuple[object, ...]:
    """Return what decides a graph: all but the weights."""
    tensors = [*model.named_parameters(), *model.named_buffers(), *batch.items()]
    forms = [(name, x.shape, x.dtype, x.requires_grad) for name, x in tensors]
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    return type(model), repr(model), tuple(forms), job.loss, own_loss, autocast


def _with_weights_of(model: nn.Module, exported: ExportedStep) -> ExportedStep:
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    graph = copied(exported.module).graph
    root = {}
    for node in graph.find_nodes(op="get_attr"):
        name = exported.names.get(str(node.target))
        root[str(node.target)] = exported.attribute(node) if name is None else own[name]
    return ExportedStep(fx.GraphModule(root, graph), exported.names)


def share_exports_of(path: Path) -> None:
    """Export the models of a plan, or of a folder's, for this process and its forks."""
    SharedExports().share()
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        # What is wrong with a plan or its model is for the ranks to say.
        with suppress(PipeplanError):
            plan = Plan.load(file)
            if plan.model.factory is not None and plan.job.loss in launched.LOSSES:
                factory = launched.allowed_factory(plan, plan.model.factory)
                launched.PlannedModel(plan, launched.build_model(plan, factory, seed=0)).export()
