"""Bounds without search: the total work against the devices' total capacity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.solver.blocks import Blocks

PRICE_STEPS = 1024
CANDIDATES = 32


@dataclass(frozen=True)
class Prices:
    """The price of a unit of time on each class, and the least cost of each block.

    For whatever prices, every assignment whose loads are at most T has
    ``sum(weights) <= T * sum(price * count)``: each block costs at least its weight where it is,
    and a device sells at most T units of time.

    Attributes:
        of_class: whole numbers, one a class.
        weights: of the blocks: their least cost over the classes that may run them.
    """

    of_class: tuple[int, ...]
    weights: NDArray[np.int64]

    def budget(self, counts: tuple[int, ...], limit: int) -> int:
        """The largest cost of what devices of these counts can do with loads up to ``limit``."""
        return limit * sum(p * count for p, count in zip(self.of_class, counts, strict=True))


def best_prices(blocks: Blocks) -> Prices:
    """Prices that make the average bound large: one class at a time, at ratios of block times."""
    times = np.array(blocks.times, dtype=np.float64).reshape(len(blocks.classes), blocks.size)
    present = [number for number, kind in enumerate(blocks.classes) if kind.count]
    first = max(present, key=lambda number: blocks.classes[number].count)
    chosen = [PRICE_STEPS] * len(blocks.classes)
    for number in present:
        if number != first:
            usable = (times[number] > 0) & (times[first] > 0)
            ratios = times[first][usable] / times[number][usable] * PRICE_STEPS
            options = {PRICE_STEPS, *_quantiles(np.clip(ratios, 0, 64 * PRICE_STEPS))}
            chosen[number] = max(
                sorted(options),
                key=lambda price, number=number: _bound(  # type: ignore[misc]
                    blocks, [*chosen[:number], price, *chosen[number + 1 :]]
                ),
            )
    return _prices(blocks, chosen)


def _quantiles(ratios: NDArray[np.float64]) -> list[int]:
    if not len(ratios):
        return []
    return [int(r) for r in np.quantile(ratios, np.linspace(0, 1, CANDIDATES), method="nearest")]


def _prices(blocks: Blocks, of_class: list[int]) -> Prices:
    costs = np.array(
        [
            [price * time if may else 2**62 for time, may in zip(times, allowed, strict=True)]
            for price, times, allowed, kind in zip(
                of_class, blocks.times, blocks.allowed, blocks.classes, strict=True
            )
            if kind.count
        ],
        dtype=np.int64,
    )
    return Prices(tuple(of_class), costs.min(axis=0))


def _bound(blocks: Blocks, of_class: list[int]) -> int:
    prices = _prices(blocks, of_class)
    capacity = prices.budget(tuple(kind.count for kind in blocks.classes), 1)
    total = sum(map(int, prices.weights))
    return -(-total // capacity) if capacity else 0


def average_bound(blocks: Blocks) -> int:
    """No assignment's largest load is below this: the average, and the largest single block."""
    largest = max(
        min(
            times[block]
            for times, allowed, kind in zip(
                blocks.times, blocks.allowed, blocks.classes, strict=True
            )
            if kind.count and allowed[block]
        )
        for block in range(blocks.size)
    )
    return max(largest, _bound(blocks, list(best_prices(blocks).of_class)))


def pigeonhole_bound(blocks: Blocks) -> int:
    """No assignment's largest load is below this: see :func:`crowded_blocks`."""
    return crowded_blocks(blocks)[0]


def crowded_blocks(blocks: Blocks, most_blocks: int = 400) -> tuple[int, list[int]]:
    """A bound, and the blocks that are too many for the devices with any lower load.

    Of the m largest blocks the devices of each class hold at most as many as the smallest of them
    fill a device; the bound is the least load with room for all m, for the best m.
    """
    classes = [number for number, kind in enumerate(blocks.classes) if kind.count]
    times = np.array([blocks.times[number] for number in classes], dtype=np.int64)
    order = np.argsort(-times.min(axis=0), kind="stable")[:most_blocks]
    counts = [blocks.classes[number].count for number in classes]
    best, crowd = 0, 1
    for m in range(1, len(order) + 1):
        filled = [np.cumsum(np.sort(row)) for row in times[:, order[:m]]]
        if _room(filled, counts, best) < m:
            best, crowd = _least_load(filled, counts, m), m
    return best, [int(block) for block in order[:crowd]]


def _room(filled: list[NDArray[np.int64]], counts: list[int], load: int) -> int:
    return sum(
        count * int(np.searchsorted(sums, load, side="right"))
        for sums, count in zip(filled, counts, strict=True)
    )


def _least_load(filled: list[NDArray[np.int64]], counts: list[int], m: int) -> int:
    low, high = -1, int(max(sums[-1] for sums in filled))
    while high - low > 1:
        middle = (low + high) // 2
        if _room(filled, counts, middle) < m:
            low = middle
        else:
            high = middle
    return high


def unplaceable(blocks: Blocks, most: int | None = None) -> bool:
    """Return whether some block fits on no device, or only with a load above ``most``."""
    return any(
        not any(
            kind.count
            and allowed[block]
            and blocks.memory[block] <= limit
            and (most is None or times[block] <= most)
            for kind, allowed, limit, times in zip(
                blocks.classes, blocks.allowed, blocks.limits, blocks.times, strict=True
            )
        )
        for block in range(blocks.size)
    )
