"""How well the groups of a run mix what workers know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.artifacts.link_table import FloatArray

LARGE = 64
"""Members from which a group's square of pairs is added by itself."""


def mixing_matrix(groups: Sequence[tuple[int, ...]], workers: int) -> FloatArray:
    """What a round of groups does to the workers' weights, on average.

    A group replaces its members' weights by their mean: a projection, equal to its own square, so
    that E[W] is E[W^T W]. A round is as many groups, one after the other, as have as many members
    together as there are workers; the product is taken to first order, exact where the groups of
    a round are disjoint.

    Returns:
        Doubly stochastic in its sums; entries of the diagonal may be negative if some workers meet
        far more often than others.
    """
    members = sum(map(len, groups))
    if not members:
        return np.eye(workers)
    pairs = np.zeros(workers * workers)
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(group)
    for size, rows in by_size.items():
        step = max(1, 2**22 // size**2)
        for begin in range(0, len(rows), step):
            pairs += _pairs(np.array(rows[begin : begin + step]), workers) / size
    met = pairs.reshape(workers, workers)
    away = np.diag(met.sum(axis=1)) - met
    matrix: FloatArray = np.eye(workers) - away * (workers / members)
    return matrix


def _pairs(rows: np.ndarray[tuple[int, int], np.dtype[np.int64]], workers: int) -> FloatArray:
    """How often each two workers are together, themselves included."""
    if len(rows) == 1 or rows.shape[1] >= LARGE:
        found = np.zeros((workers, workers))
        for row in rows:
            found[np.ix_(row, row)] += 1
        return found.ravel()
    numbers = rows[:, :, None] * workers + rows[:, None, :]
    return np.bincount(numbers.ravel(), minlength=workers * workers).astype(float)


def spectral_gap(groups: Sequence[tuple[int, ...]], workers: int) -> float:
    """1 less the second largest eigenvalue of :func:`mixing_matrix`.

    1 if every round averages everybody, 0 if some workers never learn of others; disagreement
    falls by about this share of its square in a round.
    """
    if workers == 1:
        return 1.0
    eigenvalues = np.linalg.eigvalsh(mixing_matrix(groups, workers))
    return float(min(max(1 - eigenvalues[-2], 0.0), 1.0))
