"""AD-PSGD's pairs (Lian et al. 2018, "Asynchronous Decentralized Parallel SGD").

The paper avoids the circle in which A waits for B, B for C and C for A by a bipartite graph: half
of the workers ask, the other half answers at any time. That needs no scheduler. With a scheduler
pairs may be of any two: they are drawn at random and disjoint, in one order for all.
"""

from __future__ import annotations

from random import Random

from planner.sync.groups.generator import RandomGroups


def random_pairs(random: Random) -> RandomGroups:
    """Pairs of any two workers: who has none draws one among those that have none.

    If all others are drawn already, it goes on by itself. Every two workers can meet, so any two
    are connected before long, though there is no bound.
    """
    return RandomGroups(2, slowdown_filter=None, takes_promised=False, random=random)


def halves(workers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those who ask (even numbers) and those who answer (odd numbers)."""
    return tuple(range(0, workers, 2)), tuple(range(1, workers, 2))


def passive_partner(worker: int, iteration: int, workers: int, seed: int = 0) -> int | None:
    """Who answers a worker of the asking half in an iteration.

    The same for all keys and on every machine; evenly drawn, and independent from one iteration
    and one worker to the next.

    Returns:
        None if there is nobody who could.

    Raises:
        ValueError: if the worker is not one that asks.
    """
    if worker % 2 or not 0 <= worker < workers:
        raise ValueError(f"worker {worker} of {workers} answers and does not ask")
    count = workers // 2
    if not count:
        return None
    return 2 * Random(f"{seed}/{worker}/{iteration}").randrange(count) + 1
