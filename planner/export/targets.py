"""The tools a plan can be exported to, by name."""

from __future__ import annotations

from importlib import import_module

from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.export.exported import Exported

TARGETS = {
    "torch-csv": "planner.export.torch_csv",
    "torchtitan": "planner.export.torchtitan",
    "megatron": "planner.export.megatron",
    "deepspeed": "planner.export.deepspeed",
}
"""Modules with a function ``export(plan) -> Exported``."""


def export_plan(plan: Plan, target: str) -> Exported:
    """A plan as files of another tool.

    Args:
        plan: verified.
        target: a name of :data:`TARGETS`.

    Raises:
        PipeplanError: if there is no such target, or it cannot express the plan: every reason.
    """
    if target not in TARGETS:
        raise PipeplanError(f"--to {target}: no such target; choose from {', '.join(TARGETS)}")
    exported: Exported = import_module(TARGETS[target]).export(plan)
    return exported
