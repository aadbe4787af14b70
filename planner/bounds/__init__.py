"""Proves lower bounds and emits their certificates, which planner/verification checks.

:func:`prove` yields improving bounds on all plans of a problem's space. Nothing here is taken from
the checker or from a search, and neither the checker nor what is below it imports this package.
"""

from planner.bounds.proving import ProvedBound, Prover, prove

__all__ = ["ProvedBound", "Prover", "prove"]
