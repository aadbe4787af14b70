"""The checker of certificates: its own bounds, from docs/cost_model.md and a certificate's numbers.

One pass over the numbers and the files inside a plan for the one time that a certificate names;
nothing is searched, and nothing is taken from what made it (planner/bounds).
"""

from planner.verification.proof.check import BoundCheck
from planner.verification.proof.prove import ProofReport, prove

__all__ = ["BoundCheck", "ProofReport", "prove"]
