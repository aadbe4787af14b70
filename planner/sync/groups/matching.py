"""AD-PSGD's pairs (Lian et al. 2018, "Asynchronous Decentralized Parallel SGD").

The paper avoids the deadlock in which A waits for B, B for C and C for A by a bipartite graph: half
of the workers ask, the other half answers at any time. That needs no scheduler. With a scheduler
any two workers can form a pair: pairs are drawn at random and disjoint, in one order for all.
"""

from __future__ import annotations

from random import Random


def bipartition(workers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the workers that ask (even numbers) and those that answer (odd numbers)."""
    return tuple(range(0, workers, 2)), tuple(range(1, workers, 2))


def passive_partner(worker: int, iteration: int, workers: int, seed: int = 0) -> int | None:
    """Return the worker that answers an asking worker in an iteration.

    The partner is the same for all keys and on every machine, uniformly drawn, and independent
    between iterations and workers.

    Returns:
        None if there is no other worker.

    Raises:
        ValueError: if the worker is not one that asks.
    """
    if worker % 2 or not 0 <= worker < workers:
        raise ValueError(f"worker {worker} of {workers} answers and does not ask")
    count = workers // 2
    if not count:
        return None
    return 2 * Random(f"{seed}/{worker}/{iteration}").randrange(count) + 1
