"""Building the plan's model, if the user allows it, and checking that it is the planned one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from planner.artifacts.layer_graph import GraphRecord
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.tracing.export import ExportedStep, export_step
from planner.tracing.factory import build, example_batch, import_factory
from planner.tracing.layers import LayerAssignment, assign_layers
from planner.tracing.structure import structure_differences

Factory = Callable[..., nn.Module]


def allowed_factory(plan: Plan, named: str | Factory | None) -> Factory:
    """The factory to build the model with.

    A plan is data: its factory is imported only if it is one of the zoo's or the user named the
    same one.

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
                "(models.ZOO); plans are data and import nothing by themselves: if you trust it, "
                f"add --model {recorded}"
            )
        named = recorded
    elif recorded is not None and named != recorded:
        raise PipeplanError(f"--model {named}: the plan was made for {recorded!r}")
    return import_factory(named)


def _zoo() -> Mapping[str, str]:
    """The zoo that came with this executor; empty where another package bears its name."""
    ours = Path(__file__).resolve().parents[1] / "models" / "__init__.py"
    found = find_spec("models")
    if found is None or found.origin is None or Path(found.origin).resolve() != ours:
        return {}
    return import_module("models").ZOO  # type: ignore[no-any-return]


def build_model(plan: Plan, factory: Factory, seed: int, device: torch.device) -> nn.Module:
    """The model with its initial weights, the same on every rank."""
    torch.manual_seed(seed)
    with torch.device(device):
        return build(factory, plan.model.arguments).train()


def export_planned_model(
    plan: Plan, model: nn.Module, device: torch.device
) -> tuple[ExportedStep, LayerAssignment]:
    """Export the model and make sure that its layers are the planned ones.

    Raises:
        PipeplanError: naming the first differences.
    """
    with torch.device(device):
        batch: Mapping[str, Tensor] = example_batch(model, plan.job)
        exported = export_step(model, batch, plan.job)
    layers = assign_layers(exported)
    expected: GraphRecord = plan.model.graph
    differences = structure_differences(expected, exported, layers)
    if differences:
        raise PipeplanError(
            [f"the model is not the one the plan was made for: {line}" for line in differences]
        )
    return exported, layers
