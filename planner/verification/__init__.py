"""The independent checker of plans: costs, tasks and times of its own, from docs/cost_model.md.

``verify(plan)`` returns what is wrong with a plan, a line each; ``require_valid`` raises that, and
``save_valid`` writes the plan if nothing is. It shares no formula with what makes plans: it reads
the records of a plan and imports neither the costs nor any search. Its parts, in order of use:

- ``form``, ``tensor_groups``, ``group_layers``: stages, devices, groups and orders are some that
  the job allows; a plan of groups becomes one on a cluster whose devices they are.
- ``routes``, ``layer_costs``, ``costs``, ``stage_bytes``, ``reductions``: seconds and bytes.
- ``script``, ``tasks``, ``lowering``: what there is to do, and what each task waits for; here
  orders that deadlock are found.
- ``claims``: when each task starts and ends, as a simulation claims. Nothing of it is trusted.
- ``times``, ``speeds``: each claimed time is checked without a replay.
- ``memory``, ``time_shares``, ``predicted``: what follows from these times.
- ``proof``: whether a plan's certificate proves its bound (docs/proofs.md).
- ``issue_order``: whether ranks can issue what a runtime has lowered a plan to.
"""

from planner.verification.verify import require_valid, save_valid, verify

__all__ = ["require_valid", "save_valid", "verify"]
