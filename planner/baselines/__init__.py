"""The published planners that Pipeplan is measured against; ``pipeplan compare`` alone uses them.

``BASELINES`` has them by name: ``even`` and ``grid`` divide layers evenly, ``autopipe``,
``dapple``, ``pipedream`` and ``spp`` are planners of papers. ``layers`` is what they know of a
problem, ``stage_costs`` what stages, channels and reductions cost in their models, ``along`` the
dynamic program of PipeDream and SPP, and ``scheduled`` gives their stages the fastest published
schedule.
"""

from planner.baselines.autopipe import AUTOPIPE
from planner.baselines.dapple import DAPPLE
from planner.baselines.even import EVEN, EVEN_REPLICATED, GRID
from planner.baselines.layers import Baseline
from planner.baselines.pipedream import PIPEDREAM
from planner.baselines.spp import SPP

BASELINES: dict[str, Baseline] = {
    row.name: row for row in (EVEN, EVEN_REPLICATED, GRID, AUTOPIPE, DAPPLE, PIPEDREAM, SPP)
}
"""By name, the quickest first."""
