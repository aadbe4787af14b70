"""Certificates of a search's bounds: which of them the checker of certificates confirms.

The search proves its bounds with programs of its own, in planner.search.partition. A certificate is
written only for what the verifier's checker, which shares nothing with these, confirms; where it
does not confirm a bound, the largest confirmed time below it is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from planner.errors import PipeplanError
from planner.plan.certificate import (
    Argument,
    BoundSource,
    Certificate,
    LayerPrices,
    LikeDevices,
    MicrobatchPath,
    Proof,
    TypePrices,
    UncheckedBound,
    WorkPrices,
)
from planner.plan.plan import COST_MODEL
from planner.search.budget import Clock, SearchWork
from planner.search.partition.chain import Chain
from planner.search.partition.symmetry import interchangeable_devices
from planner.units import significant
from planner.verification.proof import MOST_DEVICES, BoundCheck

Searched = LikeDevices | TypePrices | LayerPrices
"""Arguments that say whether a time is ruled out; the largest such time is searched for."""
CONFIRMED = 1 - 1e-6
"""A bound counts as confirmed if this share of it is: the verifier's tolerance."""
FIRST_STEP, GROWTH = 1e-3, 4.0
"""A confirmed time below a bound is looked for in steps down from it: this share of it, four times
that and so on, then by halves."""
COARSE, ROUGH, TOLERANCE = 2e-2, 2e-3, 1e-4
"""Shares of a time below which it is not worth another pass: of each argument at first, then while
another argument may prove more, and of the one that proves most."""
DIGITS = 6
"""Significant digits of prices: any prices prove something."""


class Certifier:
    """Looks for certificates of bounds on all plans of one problem.

    Args:
        chain: the layers.
        clock: work is charged to it.

    Attributes:
        bound_s: the largest time that is confirmed as a bound.
        argument: why; None where nothing is confirmed.
    """

    def __init__(self, chain: Chain, clock: Clock) -> None:
        self._chain, self._clock = chain, clock
        self._check = BoundCheck(chain.problem, chain.problem.job.space)
        self._arguments = list(self._own())
        self._refused_s: dict[str, float] = {}
        self._charged = 0.0
        self.bound_s = 0.0
        self.argument: Argument | None = None

    def offer(self, argument: Searched) -> None:
        """Try an argument too from now on."""
        if argument not in self._arguments:
            self._arguments.append(argument)

    def offer_prices(self, prices: Iterable[float]) -> None:
        """Try prices of devices by type too from now on."""
        self.offer(TypePrices(prices=self._by_type(prices)))

    def _own(self) -> Iterator[Searched]:
        """Yield classes of devices, the finest first, and prices of devices by their work."""
        chain = self._chain
        if chain.problem.job.max_stages_per_device > 1:
            return
        if len(chain.problem.cluster.devices) <= MOST_DEVICES:
            yield from dict.fromkeys(self._classes())
        yield TypePrices(prices=self._by_type(chain.load_prices))

    def _by_type(self, prices: Iterable[float]) -> dict[str, float]:
        rounded = (significant(price, DIGITS) for price in prices)
        return dict(zip(self._chain.types, rounded, strict=True))

    def _classes(self) -> Iterator[LikeDevices]:
        cluster = self._chain.problem.cluster
        groups = interchangeable_devices(cluster)
        held = {device for group in groups for device in group}
        alone = [(name,) for name in cluster.device_names if name not in held]
        yield LikeDevices(classes=(*map(tuple, groups), *alone))
        types = self._chain.types
        of_type = (tuple(d.name for d in cluster.devices if d.type == kind) for kind in types)
        yield LikeDevices(classes=tuple(of_type))

    def _may_be_checked(self, argument: Searched) -> bool:
        try:
            self._check.work(argument)
        except PipeplanError:
            return False
        return True

    def certify(
        self,
        bound_s: float,
        best_s: float,
        may_go_on: Callable[[], bool],
        *,
        tries_once: bool = False,
    ) -> None:
        """Look for the largest time that is confirmed as a bound.

        The checker may confirm more than the search has proved.

        Args:
            bound_s: that the search proved.
            best_s: of the best plan; no bound is higher.
            may_go_on: whether there is time for another pass of the checker.
            tries_once: the bound itself with the strongest argument, and if that fails lower
                times with the quickest one, whether there is time or not.
        """
        self._take_closed_forms(best_s)
        arguments = list(filter(self._may_be_checked, self._arguments))
        if tries_once and arguments and self.bound_s < bound_s * CONFIRMED:
            self._confirms(arguments[0], min(bound_s, best_s * CONFIRMED))
        arguments.sort(key=self._check.work)
        for argument in arguments:
            self._raise(argument, bound_s, best_s * CONFIRMED, COARSE, may_go_on)
        # Others are mostly refused at once after the one that proves most.
        arguments.sort(key=lambda argument: argument != self.argument)
        for argument in arguments:
            self._raise(argument, bound_s, best_s * CONFIRMED, ROUGH, may_go_on)
        for argument in arguments:
            if argument == self.argument:
                self._raise(argument, bound_s, best_s * CONFIRMED, TOLERANCE, may_go_on)
        if self.bound_s < bound_s * CONFIRMED:
            for argument in arguments:
                self._lower(argument, bound_s, may_go_on, insists=tries_once)
                tries_once = False

    def _take_closed_forms(self, best_s: float) -> None:
        chain, check = self._chain, self._check
        work = WorkPrices(prices=self._by_type(chain.work_prices))
        path = MicrobatchPath()
        self._take(work, min(best_s, check.least_s(work)))
        self._take(path, min(best_s, check.least_s(path)))

    def _take(self, argument: Argument, bound_s: float) -> None:
        if bound_s > self.bound_s and self._check.proves(argument, bound_s):
            self.bound_s, self.argument = bound_s, argument

    def _raise(
        self,
        argument: Searched,
        bound_s: float,
        most_s: float,
        tolerance: float,
        may_go_on: Callable[[], bool],
    ) -> None:
        """Look for a larger time than is confirmed so far, but none below a bound.

        One pass tells whether an argument adds anything; then what is left is halved.
        """
        next_s = bound_s if self.bound_s < bound_s else self.bound_s * (1 + tolerance)
        next_s = min(next_s, most_s)
        if self.bound_s < next_s and may_go_on() and self._confirms(argument, next_s):
            high_s = min(most_s, self._least_refused_s(argument))
            self._halve(argument, high_s, tolerance, may_go_on)

    def _lower(
        self, argument: Searched, bound_s: float, may_go_on: Callable[[], bool], *, insists: bool
    ) -> None:
        """Walk down from a bound to a time that is confirmed, then halve."""
        high_s, step = min(bound_s, self._least_refused_s(argument)), FIRST_STEP
        while (insists or may_go_on()) and self.bound_s < (next_s := high_s * (1 - step)):
            if self._confirms(argument, next_s):
                break
            high_s, step = next_s, GROWTH * step
        self._halve(argument, high_s, TOLERANCE, may_go_on)

    def _halve(
        self,
        argument: Searched,
        high_s: float,
        tolerance: float,
        may_go_on: Callable[[], bool],
    ) -> None:
        """Look for larger times below one that is not confirmed."""
        while may_go_on() and high_s > self.bound_s * (1 + tolerance):
            middle_s = (self.bound_s + high_s) / 2
            if not self._confirms(argument, middle_s):
                high_s = middle_s

    def _least_refused_s(self, argument: Searched) -> float:
        return self._refused_s.get(argument.model_dump_json(), math.inf)

    def _confirms(self, argument: Searched, bound_s: float) -> bool:
        refused_s = self._least_refused_s(argument)
        if bound_s >= refused_s:
            return False
        self._take(argument, bound_s)
        self._charge()
        is_confirmed = self.bound_s >= bound_s
        if not is_confirmed:
            self._refused_s[argument.model_dump_json()] = bound_s
        return is_confirmed

    def _charge(self) -> None:
        looked_at = self._check.looked_at
        self._clock.charge(SearchWork.CERTIFICATE_STAGE, looked_at - self._charged)
        self._charged = looked_at

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
        if self.argument is None:
            return None
        problem = self._chain.problem
        return Certificate(
            bound_s=self.bound_s,
            argument=self.argument,
            space=problem.job.space,
            problem_digest=problem.digest,
            cost_model=COST_MODEL,
        )
