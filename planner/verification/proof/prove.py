"""What the proof of a plan proves: its certificate checked, and what nobody can check beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.errors import PipeplanError
from planner.plan.certificate import Argument, Certificate, UncheckedBound
from planner.plan.plan import COST_MODEL, Plan
from planner.units import format_seconds
from planner.verification.proof.check import BoundCheck

TOLERANCE = 1e-6
"""Share by which figures of a plan may differ from what stands behind them."""
_REASONS = {
    "work": "the work of all microbatches, spread over the devices, takes as long",
    "path": "one microbatch's way through all layers and back takes as long",
    "budget": "no stages that the budget of all devices pays for keep that time",
    "columns": "devices with any stages that they may hold do less than all layers need",
    "classes": "no sequence of stages keeps that time on classes of like devices",
}


@dataclass(frozen=True)
class ProofReport:
    """The outcome of checking a plan's proof.

    Attributes:
        problems: why it proves nothing; empty if it holds.
        certificate: what was checked; None if there is none.
        unchecked: a higher bound that has no certificate.
        share_of_gap: of the gap between the plan and what is certified, the share that the higher
            bound closes; None without such a bound.
    """

    problems: tuple[str, ...]
    certificate: Certificate | None
    unchecked: UncheckedBound | None
    share_of_gap: float | None

    def lines(self) -> list[str]:
        """Return what was proved in words, a line each."""
        if self.certificate is None or self.problems:
            return []
        reason = _REASONS[self.certificate.argument.kind]
        said = [
            f"proved: no plan with {self.certificate.space} takes less than "
            f"{format_seconds(self.certificate.bound_s)}: {reason}"
        ]
        if self.unchecked is not None:
            said.append(
                f"not proved: the bound {format_seconds(self.unchecked.bound_s)} is CP-SAT's word "
                f"({self.unchecked.method}); it is {self.share_of_gap:.1%} of the gap that the "
                "certificate leaves"
            )
        return said

    def data(self) -> dict[str, Any]:
        """Return what was proved as plain data; null where it does not hold."""
        holds = self.certificate is not None and not self.problems
        return {
            "proved_s": self.certificate.bound_s if holds and self.certificate else None,
            "kind": self.certificate.argument.kind if self.certificate else None,
            "space": self.certificate.space.model_dump(mode="json") if self.certificate else None,
            "unchecked": self.unchecked.model_dump(mode="json") if self.unchecked else None,
            "unchecked_share_of_gap": self.share_of_gap,
        }


def prove(plan: Plan) -> ProofReport:
    """Check the certificate of a plan's bound; the plan itself is not replayed.

    Returns:
        What is proved, or why nothing is.
    """
    certificate = plan.proof.certificate if plan.proof else None
    unchecked = plan.proof.unchecked if plan.proof else None
    problems = tuple(_problems(plan, certificate))
    return ProofReport(problems, certificate, unchecked, _share_of_gap(plan))


def _problems(plan: Plan, certificate: Certificate | None) -> Iterator[str]:
    space, sizes = plan.provenance.bound_covers.space, " or ".join(map(str, plan.degrees))
    if certificate is None and space is not None and space.tensor_parallel == "any":
        yield (
            "proof.certificate: there is none for a bound over every size of tensor-parallel "
            f"groups; plan with tensor_parallel = {sizes} to have one over that size"
        )
        return
    if certificate is None:
        yield (
            "proof.certificate: there is none, nothing is proved; plan again to have one "
            "(plans of older versions have none, nor have those that lost their bound)"
        )
        return
    stale = list(proof_problems(plan))
    yield from stale
    if not stale:
        yield from _refused(plan, certificate)


def _refused(plan: Plan, certificate: Certificate) -> Iterator[str]:
    argument: Argument = certificate.argument
    try:
        problem = plan.problem
        holds = BoundCheck(problem, certificate.space).proves(argument, certificate.bound_s)
    except PipeplanError as error:
        yield from (f"proof.certificate: {problem}" for problem in error.problems)
        return
    if not holds:
        yield (
            f"proof.certificate: {certificate.bound_s} s is not proved by its argument "
            f"({argument.kind}): a checker of its own finds that less may be possible; plan again"
        )


def proof_problems(plan: Plan) -> Iterator[str]:
    """Yield why a plan's proof is not about its bound, its space, its problem and its costs."""
    proof, provenance = plan.proof, plan.provenance
    if proof is None:
        return
    bounds = [row.bound_s for row in (proof.certificate, proof.unchecked) if row is not None]
    most_s, said_s = max(bounds, default=0.0), plan.predicted.lower_bound_s
    # A search takes a bound for proved if this share of it is, to the last digit.
    if said_s * (1 - TOLERANCE) > most_s:
        yield (
            f"predicted.lower_bound_s: {said_s} s, but the plan's proof is of {most_s} s; plan "
            "again to have a higher one proved"
        )
    if most_s > plan.predicted.iteration_time_s * (1 + TOLERANCE):
        yield (
            f"proof: {most_s} s cannot be a bound, this plan itself takes "
            f"{plan.predicted.iteration_time_s} s"
        )
    certificate = proof.certificate
    if certificate is None:
        return
    if certificate.cost_model != COST_MODEL:
        yield f"proof.certificate.cost_model: {certificate.cost_model}, expected {COST_MODEL}"
    if certificate.space != provenance.bound_covers.space:
        yield (
            f"proof.certificate.space: {certificate.space}, but provenance.bound_covers is about "
            f"{provenance.bound_covers.space or 'no plan'}"
        )
    digest = plan.problem.digest_in(certificate.space)
    if certificate.problem_digest != digest:
        yield (
            f"proof.certificate.problem_digest: {certificate.problem_digest[:19]}…, but the plan's "
            f"layer graph, cluster and job have {digest[:19]}… in that space: it is about another "
            "problem"
        )


def _share_of_gap(plan: Plan) -> float | None:
    """Return how much of the gap above the certified bound the unchecked one closes."""
    if plan.proof is None or plan.proof.unchecked is None:
        return None
    certified_s = plan.proof.certificate.bound_s if plan.proof.certificate else 0.0
    whole_s = plan.predicted.iteration_time_s - certified_s
    closed_s = plan.proof.unchecked.bound_s - certified_s
    return min(1.0, closed_s / whole_s) if whole_s > 0 else 0.0
