"""What a change of the machines, the job or the plan would give: ``what_if`` values changes.

``changes`` are what can be changed and how people write it, ``altered`` makes a plan's problem and
orders under one, ``candidates`` those worth asking for, ``search`` finds the iteration time under
each: by replaying the plan, by scheduling its stages anew, by solving the changed problem.
"""

from planner.what_if.candidates import default_changes
from planner.what_if.changes import Change, parse_change
from planner.what_if.search import what_if
from planner.what_if.values import Value, WhatIf

__all__ = ["Change", "Value", "WhatIf", "default_changes", "parse_change", "what_if"]
