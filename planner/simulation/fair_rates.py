"""Max-min fair rates (Bertsekas and Gallager, Data Networks, 6.5.2).

The rates of all flows rise together until a link is full, then those over other links continue to
rise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

_ROUNDING = 1e-9
"""Share of a rate or a bandwidth by which rounding may be off."""

Link = tuple[int, int]
Demand = tuple[tuple[Link, ...], float]
"""The links of a flow and the rate that it has at most."""


def fair_rates(
    flows: Sequence[Demand],
    capacity: Mapping[Link, float],
    alike: Sequence[int] | None = None,
) -> list[float]:
    """Return the max-min fair rate of each flow.

    Args:
        flows: the links of each flow and its maximum rate, which it gets without links. A flow
            takes its rate of a link as often as it names it.
        capacity: capacity of each link, in the same unit.
        alike: how many flows each of them stands for; None: one each.
    """
    rates = [0.0] * len(flows)
    used = dict.fromkeys(capacity, 0.0)
    rising = list(range(len(flows)))
    times = [1] * len(flows) if alike is None else alike
    while rising:
        users: Counter[Link] = Counter()
        for index in rising:
            for link in flows[index][0]:
                users[link] += times[index]
        room = {link: (capacity[link] - used[link]) / count for link, count in users.items()}
        level = min([*room.values(), *(flows[index][1] for index in rising)])
        most = level * (1 + _ROUNDING)
        full = {link for link, rate in room.items() if rate <= most}
        left = []
        for index in rising:
            links, highest = flows[index]
            if highest > most and full.isdisjoint(links):
                left.append(index)
                continue
            rates[index] = min(level, highest)
            for link in links:
                used[link] += rates[index] * times[index]
        rising = left
    return rates
