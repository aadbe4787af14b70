"""The min-max program finds what trying every partition finds."""

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import inf

import numpy as np
import pytest

from planner.search.partition.dynamic_programs.min_max import (
    MinMaxTable,
    StageSpan,
    Within,
    replica_counts,
)


class RandomCosts:
    """Any cost for every stage and channel, some impossible."""

    def __init__(self, seed: int, layers: int, positions: int) -> None:
        self.random = np.random.default_rng(seed)
        self.layers = layers
        self.positions = positions
        self.replica_counts = replica_counts(positions, replication=True)
        self.stages: dict[tuple[int, int, int], np.ndarray] = {}
        self.channels: dict[tuple[int, int, int], np.ndarray] = {}

    def _draw(self, shape: tuple[int, ...]) -> np.ndarray:
        drawn = self.random.integers(0, 12, shape).astype(float)
        drawn[drawn > 10] = inf
        return drawn

    def stage_s(self, first: int, replicas: int, after: int) -> np.ndarray:
        key = (first, replicas, after)
        if key not in self.stages:
            self.stages[key] = self._draw((self.layers + 1, self.layers + 1))
            self.stages[key][np.tril_indices(self.layers + 1)] = inf
        return self.stages[key]

    def channel_s(self, first: int, replicas: int, next_replicas: int) -> np.ndarray:
        key = (first, replicas, next_replicas)
        if key not in self.channels:
            self.channels[key] = self._draw((self.layers + 1,))
        return self.channels[key]


def all_spans(layers: int, positions: int, count: int) -> Iterator[tuple[StageSpan, ...]]:
    for cuts in combinations(range(1, layers), count - 1):
        edges = [0, *cuts, layers]
        for first in range(positions):
            for held in product(range(1, positions + 1), repeat=count):
                starts = [first + sum(held[:j]) for j in range(count)]
                if starts[-1] + held[-1] <= positions:
                    yield tuple(
                        StageSpan(edges[j], edges[j + 1], starts[j], held[j]) for j in range(count)
                    )


def bottleneck(costs: RandomCosts, spans: tuple[StageSpan, ...]) -> float:
    stages = [
        costs.stage_s(span.first, span.replicas, len(spans) - 1 - index)[span.begin, span.end]
        for index, span in enumerate(spans)
    ]
    channels = [
        costs.channel_s(span.first, span.replicas, after.replicas)[span.end]
        for span, after in pairwise(spans)
    ]
    return float(max(stages + channels))


@pytest.mark.parametrize("seed", range(25))
def test_least_bottleneck_is_the_best_of_all_partitions(seed: int) -> None:
    costs = RandomCosts(seed, layers=5, positions=4)
    table = MinMaxTable(costs)
    for count in range(1, 5):
        table.add_stage()
        every = [bottleneck(costs, spans) for spans in all_spans(5, 4, count)]
        assert table.bottleneck_s(count) == min(every)
        spans = table.spans(count)
        assert (spans is None) == (min(every) == inf)
        if spans is not None:
            assert spans in set(all_spans(5, 4, count))
            assert bottleneck(costs, spans) == min(every)


@pytest.mark.parametrize("seed", range(25))
def test_a_limit_leaves_what_is_below_it_as_it_is(seed: int) -> None:
    """Nothing can stand in front of the first position; elsewhere nothing is known."""
    costs = RandomCosts(seed, layers=5, positions=4)
    limit_s = float(4 + seed % 5)

    def before_s(positions: int) -> np.ndarray:
        return np.zeros(6) if positions else np.array([0.0, *[inf] * 5])

    table, limited = MinMaxTable(costs), MinMaxTable(costs, Within(limit_s, before_s))
    for count in range(1, 5):
        table.add_stage()
        limited.add_stage()
        if table.bottleneck_s(count) < limit_s:
            assert limited.bottleneck_s(count) == table.bottleneck_s(count)
            assert bottleneck(costs, limited.spans(count)) == table.bottleneck_s(count)
        else:
            assert limited.bottleneck_s(count) >= limit_s


def test_more_stages_than_layers_or_devices_have_no_partition() -> None:
    table = MinMaxTable(RandomCosts(0, layers=2, positions=4))
    for _ in range(4):
        table.add_stage()
    assert table.spans(3) is None
    assert table.spans(4) is None


def test_replica_counts_are_all_of_a_few_and_powers_of_two_of_many() -> None:
    assert replica_counts(5, replication=True) == (1, 2, 3, 4, 5)
    assert replica_counts(40, replication=True) == (1, 2, 4, 8, 16, 32, 40)
    assert replica_counts(40, replication=True, most_choices=40) == tuple(range(1, 41))
    assert replica_counts(40, replication=False) == (1,)
