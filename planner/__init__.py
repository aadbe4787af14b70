"""Pipeplan's planner: plans for pipeline-parallel training, with a proven bound.

The names below are the public API. They are imported when first used, so that importing
``planner`` stays fast and needs neither torch nor ortools.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.adopting.adopt import adopt
    from planner.artifacts.cluster import Cluster
    from planner.artifacts.job import Job
    from planner.artifacts.layer_graph import LayerGraph
    from planner.artifacts.measured import MeasuredTimeline
    from planner.artifacts.plan import Plan
    from planner.artifacts.problem import ModelSource, Problem
    from planner.calibration.calibrate import calibrate
    from planner.comparison import compare
    from planner.deviation import compare_with_measured
    from planner.errors import DeadlockError, InfeasibleError, PipeplanError
    from planner.export.targets import export_plan
    from planner.partition.exact.optimum import search_partition
    from planner.replanning.replan import Replanned, replan
    from planner.result import Result
    from planner.robustness import Noise, times_under_noise
    from planner.schedule.search import search_schedule
    from planner.simulator import simulate_plan as simulate
    from planner.solver import solve
    from planner.sweeping.run import sweep
    from planner.sync.choice import choose as choose_sync
    from planner.sync.simulation.comparison import compare_syncs
    from planner.tracing.trace import trace
    from planner.verifier import verify

_HOME = {
    "Cluster": ("planner.artifacts.cluster", "Cluster"),
    "DeadlockError": ("planner.errors", "DeadlockError"),
    "InfeasibleError": ("planner.errors", "InfeasibleError"),
    "Job": ("planner.artifacts.job", "Job"),
    "LayerGraph": ("planner.artifacts.layer_graph", "LayerGraph"),
    "MeasuredTimeline": ("planner.artifacts.measured", "MeasuredTimeline"),
    "ModelSource": ("planner.artifacts.problem", "ModelSource"),
    "Noise": ("planner.robustness", "Noise"),
    "PipeplanError": ("planner.errors", "PipeplanError"),
    "Plan": ("planner.artifacts.plan", "Plan"),
    "Problem": ("planner.artifacts.problem", "Problem"),
    "Replanned": ("planner.replanning.replan", "Replanned"),
    "Result": ("planner.result", "Result"),
    "adopt": ("planner.adopting.adopt", "adopt"),
    "calibrate": ("planner.calibration.calibrate", "calibrate"),
    "choose_sync": ("planner.sync.choice", "choose"),
    "compare": ("planner.comparison", "compare"),
    "compare_syncs": ("planner.sync.simulation.comparison", "compare_syncs"),
    "compare_with_measured": ("planner.deviation", "compare_with_measured"),
    "export_plan": ("planner.export.targets", "export_plan"),
    "replan": ("planner.replanning.replan", "replan"),
    "search_partition": ("planner.partition.exact.optimum", "search_partition"),
    "search_schedule": ("planner.schedule.search", "search_schedule"),
    "simulate": ("planner.simulator", "simulate_plan"),
    "solve": ("planner.solver", "solve"),
    "sweep": ("planner.sweeping.run", "sweep"),
    "times_under_noise": ("planner.robustness", "times_under_noise"),
    "trace": ("planner.tracing.trace", "trace"),
    "verify": ("planner.verifier", "verify"),
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
    "calibrate",
    "choose_sync",
    "compare",
    "compare_syncs",
    "compare_with_measured",
    "export_plan",
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
