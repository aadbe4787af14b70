"""Certificates of a search's bounds: what planner.bounds proves beside its own programs."""

from __future__ import annotations

from collections.abc import Callable

from planner.bounds import ProvedBound, Prover
from planner.plan.certificate import Argument, BoundSource, Certificate, Proof, UncheckedBound
from planner.search.budget import Clock, SearchWork
from planner.search.partition.chain import Chain

CONFIRMED = 1 - 1e-6
"""A bound counts as certified if this share of it is: the verifier's tolerance."""
FEW = 12
"""Passes that are made at the end though no time is left, rather than a bound without a
certificate."""


class Certifier:
    """Looks for certificates of bounds on all plans of one problem.

    Args:
        chain: the layers.
        clock: work is charged to it.
    """

    def __init__(self, chain: Chain, clock: Clock) -> None:
        self._chain, self._clock = chain, clock
        self._prover = Prover(chain.problem)
        self._found: ProvedBound | None = None

    @property
    def bound_s(self) -> float:
        """The largest time that is certified as a bound; 0 before the first."""
        return self._found.bound_s if self._found else 0.0

    @property
    def argument(self) -> Argument | None:
        """Why; None before the first."""
        return self._found.argument if self._found else None

    def certify(
        self, best_s: float, may_go_on: Callable[[], bool], *, tries_once: bool = False
    ) -> None:
        """Look for the largest time that is certified as a bound.

        Args:
            best_s: of the best plan; no bound is higher.
            may_go_on: whether there is time for another pass.
            tries_once: a few passes, whether there is time or not.
        """
        self._prover.best_s = best_s
        for number, found in enumerate(self._prover.steps()):
            before = self._found.looked_at if self._found else 0.0
            self._clock.charge(SearchWork.CERTIFICATE_STAGE, found.looked_at - before)
            self._found = found
            if not may_go_on() and not (tries_once and number < FEW):
                break

    def proof(self, bound_s: float, source: BoundSource, method: str) -> Proof | None:
        """Return what stands behind a bound; None if there is none.

        Args:
            bound_s: that the search proved.
            source: what proved it.
            method: in which step.
        """
        if bound_s <= 0:
            return None
        unchecked = None
        if self.bound_s < bound_s * CONFIRMED:
            unchecked = UncheckedBound(bound_s=bound_s, source=source, method=method)
        return Proof(certificate=self._certificate(), unchecked=unchecked)

    def _certificate(self) -> Certificate | None:
        return self._found.certificate(self._chain.problem) if self._found else None
