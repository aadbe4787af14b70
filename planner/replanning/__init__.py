"""Plans for what is left of the machines, or what came: ``replan`` changes a plan as they changed.

``changes`` are what may happen to machines, ``machines`` and ``addition`` the problem after it,
``state`` what devices hold, ``groups``, ``recut`` and ``repair`` the old stages repaired,
``keeping`` and ``choice`` what stays in place, ``moves`` what does not.
"""

from planner.replanning.changes import Slow, Twin, parse_added, parse_slow
from planner.replanning.choice import Alternative
from planner.replanning.replan import Replanned, replan

__all__ = ["Alternative", "Replanned", "Slow", "Twin", "parse_added", "parse_slow", "replan"]
