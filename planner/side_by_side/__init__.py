"""Plans that consist of pipelines, for strategies whose pipelines train side by side.

One pipeline is planned on a share of the devices, with a share of the microbatches; the others take
the same stages at the same places. The bound is that of all plans: these are among them.

``groupings`` divides the devices, ``pipelines`` makes a plan of one pipeline and multiplies it,
``search`` tries all groupings, then bounds; it hands out ``solve_side_by_side``.
"""

from planner.side_by_side.search import solve_side_by_side

__all__ = ["solve_side_by_side"]
