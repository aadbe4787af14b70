"""Pipeplan's planner: plans for pipeline-parallel training, with a proven bound.

The names below are the public API. They are imported when first used, so that importing
``planner`` stays fast and needs neither torch nor ortools.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.analysis.comparison import compare as compare
    from planner.analysis.deviation import compare_with_measured as compare_with_measured
    from planner.analysis.moves import apply_move as apply_move
    from planner.analysis.moves import moves as moves
    from planner.analysis.sweep.run import sweep as sweep
    from planner.cli.shown import explain as explain
    from planner.cli.shown import plot as plot
    from planner.cluster.cluster import Cluster as Cluster
    from planner.errors import DeadlockError as DeadlockError
    from planner.errors import InfeasibleError as InfeasibleError
    from planner.errors import PipeplanError as PipeplanError
    from planner.interop.adopted import adopt as adopt
    from planner.interop.calibration import calibrate as calibrate
    from planner.interop.exported import export_plan as export_plan
    from planner.job import Job as Job
    from planner.measured.timeline import MeasuredTimeline as MeasuredTimeline
    from planner.model.layer_graph import LayerGraph as LayerGraph
    from planner.plan.plan import Plan as Plan
    from planner.plan.problem import ModelSource as ModelSource
    from planner.plan.problem import Problem as Problem
    from planner.prediction import load_plan as load_plan
    from planner.replanning.replan import Replanned as Replanned
    from planner.replanning.replan import replan as replan
    from planner.search.orders.search import search_schedule as search_schedule
    from planner.search.result import Result as Result
    from planner.search.solve import solve as solve
    from planner.simulation.noise import Noise as Noise
    from planner.simulation.noise import times_under_noise as times_under_noise
    from planner.simulation.simulator import simulate_plan as _simulate_plan
    from planner.sync.choice import choose as _choose
    from planner.sync.simulation.comparison import compare_syncs as compare_syncs
    from planner.tracing.trace import trace as trace
    from planner.verification import verify as verify

    simulate = _simulate_plan
    choose_sync = _choose

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
    "adopt": ("planner.interop.adopted", "adopt"),
    "apply_move": ("planner.analysis.moves", "apply_move"),
    "calibrate": ("planner.interop.calibration", "calibrate"),
    "choose_sync": ("planner.sync.choice", "choose"),
    "compare": ("planner.analysis.comparison", "compare"),
    "compare_syncs": ("planner.sync.simulation.comparison", "compare_syncs"),
    "compare_with_measured": ("planner.analysis.deviation", "compare_with_measured"),
    "explain": ("planner.cli.shown", "explain"),
    "export_plan": ("planner.interop.exported", "export_plan"),
    "load_plan": ("planner.prediction", "load_plan"),
    "moves": ("planner.analysis.moves", "moves"),
    "plot": ("planner.cli.shown", "plot"),
    "replan": ("planner.replanning.replan", "replan"),
    "search_schedule": ("planner.search.orders.search", "search_schedule"),
    "simulate": ("planner.simulation.simulator", "simulate_plan"),
    "solve": ("planner.search.solve", "solve"),
    "sweep": ("planner.analysis.sweep.run", "sweep"),
    "times_under_noise": ("planner.simulation.noise", "times_under_noise"),
    "trace": ("planner.tracing.trace", "trace"),
    "verify": ("planner.verification", "verify"),
}

__all__ = sorted(_HOME)


logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    module, attribute = _HOME[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
