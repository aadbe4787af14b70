"""Figures that proofs of bounds rest on: none is above what it stands for on any devices."""

import heapq
import random
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, permutations

import numpy as np
import pytest

from planner import Cluster
from planner.costs.collectives import all_reduce_s
from planner.verification.proof.figures import IntArray
from planner.verification.proof.links import AnyLinks, ClassLinks
from planner.verification.proof.staggered import (
    NUMBERS,
    around_s,
    passed_s,
    replicas_by_number,
)

SIZES = np.array([1e3, 1e6, 1e9])
"""Bytes: latency counts most of a few, bandwidth of many."""


def nodes(rng: random.Random) -> Cluster:
    """Return two or three nodes of one to three devices on a network, of any widths."""

    def link(ends: list[str]) -> dict[str, object]:
        return {
            "between": ends,
            "bandwidth_gb_per_s": rng.choice([1, 3, 25]),
            "latency_us": rng.choice([1, 20, 300]),
            "source": "assumed",
            "duplex": rng.choice(["full", "full", "half"]),
        }

    names = [f"n{i}" for i in range(rng.randint(2, 3))]
    devices = {name: [f"{name}/d{i}" for i in range(rng.randint(1, 3))] for name in names}
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "nodes",
            "switches": ["net", *names],
            "devices": [{"name": d, "type": "A10"} for name in names for d in devices[name]],
            "links": [
                *(link([d, name]) for name in names for d in devices[name]),
                *(link([name, "net"]) for name in names),
            ],
        }
    )


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Return all sets of two devices or more."""
    return chain.from_iterable(combinations(names, n) for n in range(2, len(names) + 1))


def held(devices: Sequence[str], classes: Sequence[Sequence[str]]) -> IntArray:
    """Return how many devices of each class there are."""
    return np.array([sum(name in devices for name in row) for row in classes])


@pytest.mark.parametrize("seed", range(8))
def test_no_least_reduction_is_above_that_of_any_devices(seed: int) -> None:
    """All of one class, the devices of each node, or every device by itself."""
    rng = random.Random(seed)
    cluster = nodes(rng)
    names, anywhere = cluster.device_names, AnyLinks(cluster)
    by_node: dict[str, list[str]] = {}
    for name in names:
        by_node.setdefault(name[:2], []).append(name)
    for classes in ([names], [*by_node.values()], [(name,) for name in names]):
        links = ClassLinks(cluster, classes)

        for devices in subsets(names):
            exact_s = [all_reduce_s(cluster, devices, int(size)) for size in SIZES]
            most_s = np.array(exact_s) * (1 + 1e-12)
            count = np.full(len(SIZES), len(devices))
            assert (links.all_reduce_s(held(devices, classes), SIZES) <= most_s).all()
            assert (anywhere.all_reduce_s(count, SIZES) <= most_s).all()
            more = np.where(held(devices, classes) > 0, links.sizes, 0)
            assert (links.reduced_s(more > 0, len(devices), SIZES, more) <= most_s).all()
            part = tuple(rng.sample(devices, rng.randint(1, len(devices) - 1)))
            kept = held(part, classes) > 0
            assert (links.reduced_s(kept, len(part) + 1, SIZES) <= most_s).all()


def test_more_devices_than_a_node_has_reduce_over_the_network() -> None:
    """The ring of nine devices of two nodes passes the network in every step."""
    of_node = [{"name": f"n{i}", "devices": 8, "type": "A10", "link": "PCIe4-x16"} for i in (0, 1)]
    wires = [{"between": [f"n{i}", "net"], "preset": "Ethernet-10G"} for i in (0, 1)]
    cluster = Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "two",
            "switches": ["net"],
            "nodes": of_node,
            "links": wires,
        }
    )
    links = ClassLinks(cluster, [cluster.device_names])
    (least_s,) = links.all_reduce_s(np.array([9]), np.array([25e6]))
    assert least_s == pytest.approx(all_reduce_s(cluster, cluster.device_names[:9], 25_000_000))
    assert links.counts_by_width() == [(1, 8), (9, 12), (13, 16)]


@pytest.mark.parametrize("seed", range(40))
def test_no_microbatch_passes_a_stage_sooner_than_said(seed: int) -> None:
    """Against replicas that take what comes, first come, first served."""
    rng = random.Random(seed)
    replicas, each_s = rng.randint(1, 5), rng.choice([0.0, 0.5, 3.0])
    come_s = sorted(rng.choice([rng.uniform(0, 9), rng.randint(0, 3)]) for _ in range(12))
    free_s, done_s = [0.0] * replicas, []
    for came_s in come_s:
        done_s.append(max(came_s, heapq.heappop(free_s)) + each_s)
        heapq.heappush(free_s, done_s[-1])
    columns = [number - 1 for number in NUMBERS if number <= len(come_s)]
    rows = np.array(come_s)[columns, None]
    said_s = passed_s(rows, np.array([each_s]), np.array([replicas]))[:, 0]
    assert (said_s <= np.array(sorted(done_s))[columns] + 1e-12).all()
    assert said_s[-1] >= come_s[-1] + each_s


@pytest.mark.parametrize("seed", range(40))
def test_replicas_that_begin_and_end_one_after_the_other_run_no_more_than_said(seed: int) -> None:
    """Against every way to say which replica ends when."""
    rng = random.Random(seed)
    count, each_s, limit_s = rng.randint(1, 6), rng.uniform(1, 4), rng.uniform(5, 20)
    begin_s, end_s = (sorted(rng.uniform(0, 6) for _ in range(count)) for _ in range(2))
    most = max(
        sum(int(max(limit_s - a - b, 0) // each_s) for a, b in zip(begin_s, row, strict=True))
        for row in permutations(end_s)
    )
    columns = [number - 1 for number in NUMBERS if number <= count]
    rows = (np.array(values)[columns, None] for values in (begin_s, end_s))
    spare_s = np.maximum(limit_s - around_s(*rows), 0.0)
    numbers = replicas_by_number(np.array([count]), len(columns))
    assert numbers.sum() == count
    assert most <= (numbers * (spare_s // each_s)).sum()
