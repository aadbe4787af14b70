"""``replan``: a new plan after machines were lost, slowed or added, which moves little state.

:mod:`planner.variants.machine_changes` has the changes and the problem after them. ``state`` is
what each device holds and what must be moved. ``repair`` makes first plans from the old stages,
with cuts from ``recut``; the steps of ``solve`` follow. ``choice`` takes a plan that is fast and
moves few bytes.
"""

from planner.replanning.choice import Alternative
from planner.replanning.replan import Replanned, replan
from planner.variants.machine_changes import SlowedDevice, Twin, parse_added, parse_slow

__all__ = [
    "Alternative",
    "Replanned",
    "SlowedDevice",
    "Twin",
    "parse_added",
    "parse_slow",
    "replan",
]
