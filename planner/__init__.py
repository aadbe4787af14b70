"""Pipeplan's planner: plans for pipeline-parallel training, with a proven bound.

The names below are the public API. They are imported when first used, so that importing
``planner`` stays fast and needs neither torch nor ortools.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.analysis.comparison import compare
    from planner.analysis.deviation import compare_with_measured
    from planner.analysis.moves import apply_move, moves
    from planner.analysis.sweep.run import sweep
    from planner.cluster.cluster import Cluster
    from planner.errors import DeadlockError, InfeasibleError, PipeplanError
    from planner.interop.adopt.adopt import adopt
    from planner.interop.calibrate.calibrate import calibrate
    from planner.interop.export.exported import export_plan
    from planner.job import Job
    from planner.measured.timeline import MeasuredTimeline
    from planner.model.layer_graph import LayerGraph
    from planner.plan.plan import Plan
    from planner.plan.problem import ModelSource, Problem
    from planner.prediction import load_plan
    from planner.replanning.replan import Replanned, replan
    from planner.search.partition.cp_sat.optimum import search_partition
    from planner.search.result import Result
    from planner.search.schedule.search import search_schedule
    from planner.search.solve import solve
    from planner.simulation.noise import Noise, times_under_noise
    from planner.simulation.simulator import simulate_plan as simulate
    from planner.sync.choice import choose as choose_sync
    from planner.sync.simulation.comparison import compare_syncs
    from planner.tracing.trace import trace
    from planner.verification import verify

_HOME = {
    "Cluster": ("planner.cluster.cluster", "Cluster"),
    "DeadlockError": ("planner.errors", "DeadlockError"),
    "InfeasibleError": ("planner.errors", "InfeasibleError"),
    "Job": ("planner.job", "Job"),
    "LayerGraph": ("planner.model.layer_graph", "LayerGraph"),
    "MeasuredTimeline": ("planner.measured.timeline", "MeasuredTimeline"),
    "ModelSource": ("planner.plan.problem", "ModelSource"),
    "Noise": ("planner.simulation.noise", "Noise"),
    "PipeplanError": ("planner.errors", "PipeplanError"),
    "Plan": ("planner.plan.plan", "Plan"),
    "Problem": ("planner.plan.problem", "Problem"),
    "Replanned": ("planner.replanning.replan", "Replanned"),
    "Result": ("planner.search.result", "Result"),
    "adopt": ("planner.interop.adopt.adopt", "adopt"),
    "apply_move": ("planner.analysis.moves", "apply_move"),
    "calibrate": ("planner.interop.calibrate.calibrate", "calibrate"),
    "choose_sync": ("planner.sync.choice", "choose"),
    "compare": ("planner.analysis.comparison", "compare"),
    "compare_syncs": ("planner.sync.simulation.comparison", "compare_syncs"),
    "compare_with_measured": ("planner.analysis.deviation", "compare_with_measured"),
    "export_plan": ("planner.interop.export.exported", "export_plan"),
    "load_plan": ("planner.prediction", "load_plan"),
    "moves": ("planner.analysis.moves", "moves"),
    "replan": ("planner.replanning.replan", "replan"),
    "search_partition": ("planner.search.partition.cp_sat.optimum", "search_partition"),
    "search_schedule": ("planner.search.schedule.search", "search_schedule"),
    "simulate": ("planner.simulation.simulator", "simulate_plan"),
    "solve": ("planner.search.solve", "solve"),
    "sweep": ("planner.analysis.sweep.run", "sweep"),
    "times_under_noise": ("planner.simulation.noise", "times_under_noise"),
    "trace": ("planner.tracing.trace", "trace"),
    "verify": ("planner.verification", "verify"),
}

__all__ = [
    "Cluster",
    "DeadlockError",
    "InfeasibleError",
    "Job",
    "LayerGraph",
    "MeasuredTimeline",
    "ModelSource",
    "Noise",
    "PipeplanError",
    "Plan",
    "Problem",
    "Replanned",
    "Result",
    "adopt",
    "apply_move",
    "calibrate",
    "choose_sync",
    "compare",
    "compare_syncs",
    "compare_with_measured",
    "export_plan",
    "load_plan",
    "moves",
    "replan",
    "search_partition",
    "search_schedule",
    "simulate",
    "solve",
    "sweep",
    "times_under_noise",
    "trace",
    "verify",
]


logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    module, attribute = _HOME[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
