"""``what_if``: the iteration time that a change of the machines, the job or the plan would give.

:mod:`planner.variants.changes` has the changes and their text form. Here ``altered`` makes a plan's
problem, stages and orders under a change, ``candidates`` proposes changes for a plan, and
``search`` finds the iteration time under each: it replays the plan, schedules its stages again and,
if asked, solves the changed problem. ``case`` holds what is known of one change, ``values`` the
results.
"""

from planner.analysis.what_if.candidates import default_changes
from planner.analysis.what_if.search import what_if
from planner.analysis.what_if.values import Value, WhatIf
from planner.variants.changes import Change, parse_change

__all__ = ["Change", "Value", "WhatIf", "default_changes", "parse_change", "what_if"]
