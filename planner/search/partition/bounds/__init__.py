"""Lower bounds on the iteration time: of one partition over all schedules, and of every plan.

``schedule`` bounds every schedule of given stages, ``quick`` does the same incrementally for
searches, and ``partition`` adds memory and whatever the stages recompute, and bounds every plan by
the total work; see :mod:`planner.search.partition.relaxations` for tighter bounds.
"""
