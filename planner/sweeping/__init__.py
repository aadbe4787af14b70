"""Plans at many points: microbatch sizes and counts, numbers of devices, clusters; ``sweep``.

``points`` are the combinations, ``devices`` chooses which of a cluster's devices a point may use,
``work`` solves one, ``engines`` many at a time, on this machine or (``ray_engine``) on a cluster;
``folder`` keeps what was found, ``rows`` and ``front`` compare it, ``run`` is the sweep itself.
"""

from planner.sweeping.engines import Engine, InTurn, Processes
from planner.sweeping.front import pareto_front
from planner.sweeping.rows import SweepRow
from planner.sweeping.run import SweepResult, sweep

__all__ = [
    "Engine",
    "InTurn",
    "Processes",
    "SweepResult",
    "SweepRow",
    "pareto_front",
    "sweep",
]
