"""The independent checker of plans: its own replay and its own costs, from docs/cost_model.md.

It shares no formula and no replay with what makes plans: it reads the records of a plan and
imports neither costs nor the simulator nor any search. A mistake there shows as a refused plan.
"""

from planner.verification.verify import require_valid, save_valid, verify

__all__ = ["require_valid", "save_valid", "verify"]
