"""What a baseline knows of a problem, for tests."""

from planner.baselines.layers import Layers
from planner.costs.stage_table import StageTable
from planner.plan.problem import Problem


def layers_of(problem: Problem) -> Layers:
    """Its layers, nothing recomputed."""
    return Layers(StageTable(problem))
