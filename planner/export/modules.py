"""The modules that each stage keeps, where a tool cuts a model at top-level modules only."""

from __future__ import annotations

from planner.artifacts.plan import Plan
from planner.export.cuts import LOSS


def module_of(layer: str) -> str:
    """The module a layer belongs to: an entry of a top-level list, or a top-level child.

    ``layers.3`` is itself, ``lm_head`` too; ``model.layers.3`` is within ``model``. ``norm#2``, a
    second run of the module ``norm``, is within ``norm``.
    """
    parts = layer.partition("#")[0].split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else parts[0]


def modules_of_stages(plan: Plan, tool: str) -> tuple[list[list[str]], list[str]]:
    """The modules of each stage, and what of the plan cuts through one.

    Args:
        plan: whose layers are named as its model's modules.
        tool: as the lines name it.
    """
    stages: dict[str, list[int]] = {}
    inside: dict[str, list[str]] = {}
    for stage in plan.stages:
        for layer in stage.layers:
            if layer != LOSS:
                stages.setdefault(module_of(layer), []).append(stage.index)
                inside.setdefault(module_of(layer), []).append(layer)
    problems = [
        _cut_inside(module, inside[module], found, tool)
        for module, found in stages.items()
        if len(set(found)) > 1
    ]
    modules = [
        list(dict.fromkeys(module_of(layer) for layer in stage.layers if layer != LOSS))
        for stage in plan.stages
    ]
    return modules, problems


def lists_of(modules: list[list[str]]) -> list[str]:
    """Top-level modules that are cut entry by entry."""
    found = (name.partition(".") for stage in modules for name in stage)
    return list(dict.fromkeys(first for first, dot, _ in found if dot))


def _cut_inside(module: str, layers: list[str], stages: list[int], tool: str) -> str:
    found = sorted(set(stages))
    shown = ", ".join(map(repr, layers[:4])) + (", …" if len(layers) > 4 else "")
    which = " and ".join(map(str, found)) if len(found) < 3 else f"{found[0]} to {found[-1]}"
    return (
        f"stages: the module {module!r} (layers {shown}) lies in stages {which}, but {tool} cuts "
        "only at top-level modules and at the entries of a top-level ModuleList or ModuleDict; "
        f"move the layers of {module!r} to one stage, or plan the model that has its blocks at "
        "the top level"
    )
