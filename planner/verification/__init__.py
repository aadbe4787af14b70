"""The independent checker of plans: costs, tasks and times of its own, from docs/cost_model.md.

``verify(plan)`` returns what is wrong with a plan, a line each; ``require_valid`` raises that, and
``save_valid`` writes the plan if nothing is. It shares no formula with what makes plans: it reads
the records of a plan and imports neither the costs nor any search. Tensor-parallel groups are
devices of the problem that the plan states (:attr:`planner.plan.plan.Plan.on_groups`). Its parts,
in order of use:

- ``form``: stages, devices, groups and orders are some that the job allows.
- ``routes``, ``layer_costs``, ``costs``, ``reductions``: seconds and bytes.
- ``tasks``: what there is to do, and what each task waits for; here orders that deadlock are found.
- ``claims``: what a simulation says of the plan. No time of it is trusted.
- ``times``, ``speeds``: each claimed time is checked without a replay.
- ``memory``, ``predicted``: what follows from these times.
- ``proof``: whether a plan's certificate proves its bound (docs/proofs.md).
- ``issue_order``: whether ranks can issue what a runtime has lowered a plan to.
"""

from planner.verification.verify import require_valid, save_valid, verify

__all__ = ["require_valid", "save_valid", "verify"]
