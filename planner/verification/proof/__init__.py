"""The checker of certificates: its own bounds, from docs/cost_model.md and a certificate's numbers.

One pass over the numbers and the files inside a plan; nothing is searched, and nothing is taken
from what made the certificate.
"""

from planner.verification.proof.check import MOST_DEVICES, BoundCheck
from planner.verification.proof.prove import ProofReport, prove

__all__ = ["MOST_DEVICES", "BoundCheck", "ProofReport", "prove"]
