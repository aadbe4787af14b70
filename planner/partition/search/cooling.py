"""How much worse a step of simulated annealing may be, as it cools down."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Cooling:
    """Geometric cooling.

    Attributes:
        hottest, coolest: by what share of its value a step may be worse, on average, at the start
            and at the end.
    """

    hottest: float
    coolest: float

    def most(self, value: float, spent: float, rng: random.Random) -> float:
        """Metropolis' rule, turned round: what the next step may come to at most.

        Args:
            value: where the walk stands.
            spent: share of the walk that is over, from 0 to 1.
            rng: one number is drawn from it.
        """
        heat: float = self.hottest * (self.coolest / self.hottest) ** spent
        return value * (1 - heat * math.log(1 - rng.random()))
