"""Plans at many points: microbatch sizes and counts, numbers of devices, clusters; ``sweep``.

``points`` are the combinations. ``work`` chooses the devices of one point and solves it,
``engines`` solve many at a time on this machine or on a Ray cluster.
``folder`` keeps what was found, ``rows`` compares it, and ``run`` is the sweep itself.
"""

from planner.analysis.sweep.engines import Engine, InTurn, Processes, RayEngine
from planner.analysis.sweep.rows import SweepRow, pareto_front
from planner.analysis.sweep.run import SweepResult, sweep

__all__ = [
    "Engine",
    "InTurn",
    "Processes",
    "RayEngine",
    "SweepResult",
    "SweepRow",
    "pareto_front",
    "sweep",
]
