"""How messages that share links take turns over gloo, beside the rules of the simulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.reporting.report import heading, table
from benchmarks.testbed.check import check
from benchmarks.testbed.measured import measured_cluster
from benchmarks.testbed.network import Testbed
from benchmarks.testbed.scenario import Move, Policy, Scenario, Times, measure
from planner import Cluster
from planner.costs.collectives import all_reduce_s
from planner.errors import PipeplanError

SIZES_BYTES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 20_000_000)
MEETING_BYTES = 1_000_000
REDUCED_BYTES = (10_000, 100_000, 1_000_000, 4_000_000)
POLICIES: tuple[Policy, ...] = ("together", "sent", "received")
LEAST_DEVICES = 4


@dataclass(frozen=True)
class Row:
    """A scenario and the words for it."""

    what: str
    scenario: Scenario


def rules_report(cluster: Cluster, command: str, repeats: int) -> str:
    """Measure the cluster's links first; what the rules predict is by these.

    Raises:
        PipeplanError: for a cluster of fewer than four devices.
    """
    if len(cluster.devices) < LEAST_DEVICES:
        raise PipeplanError(
            f"cluster {cluster.name}: {len(cluster.devices)} devices; give one of "
            f"{LEAST_DEVICES} or more, so that transfers can meet"
        )
    rows = [*_single(repeats), *_meeting(repeats)]
    reductions = _reductions(repeats)
    with Testbed(cluster) as testbed:
        measured = measured_cluster(cluster, check(testbed, repeats))
        scenarios = [row.scenario for row in (*rows, *reductions)]
        times = measure(testbed, cluster.device_names, scenarios)
    return "\n".join(
        [
            heading(f"Transfers on the testbed {cluster.name}", command),
            "Milliseconds, medians. The rules are given the latencies and bandwidths measured on "
            "single messages just before. Ends are in the order of the messages.\n",
            "## Transfers\n",
            table(
                ["messages", "next one when", "by the rules", "measured", "last one's error"],
                [_cells(measured, row, found) for row, found in zip(rows, times, strict=False)],
            ),
            "## All-reduces\n",
            table(
                ["members", "bytes", "by the rules", "measured", "measured / rules"],
                [
                    _reduction_cells(measured, row.scenario, found)
                    for row, found in zip(reductions, times[len(rows) :], strict=True)
                ],
            ),
        ]
    )


def ends_by_the_rules(cluster: Cluster, moves: Sequence[Move]) -> list[float]:
    """Seconds until each move has arrived if all are requested at once, in this order."""
    free_s: dict[tuple[int, int], float] = defaultdict(float)
    ends = []
    for move in moves:
        source, target = cluster.device_names[move.source], cluster.device_names[move.target]
        route = cluster.route(source, target)
        assert route is not None, f"{source} reaches {target}"
        start = max(free_s[link] for link in route.links)
        ends.append(start + route.seconds(move.bytes_))
        free_s.update(dict.fromkeys(route.links, ends[-1]))
    return ends


def _single(repeats: int) -> list[Row]:
    rows = []
    for target in (1, 2):
        for size in SIZES_BYTES:
            scenario = Scenario((Move(0, target, size),), repeats=repeats)
            rows.append(Row(f"0 > {target}, {size:,} bytes", scenario))
    return rows


def _meeting(repeats: int) -> list[Row]:
    """Sets of messages that share links, under each policy where one source sends several."""
    sets = {
        "one source, two targets": [(0, 1), (0, 2)],
        "one source, two targets alike": [(0, 2), (0, 3)],
        "two sources, one target": [(0, 2), (1, 2)],
        "both ways": [(0, 1), (1, 0)],
        "both ways, far": [(0, 2), (2, 0)],
        "two pairs": [(0, 2), (1, 3)],
        "a chain": [(0, 1), (1, 2), (2, 3)],
        "four to one peer": [(0, 1)] * 4,
    }
    rows = []
    for what, pairs in sets.items():
        moves = tuple(Move(source, target, MEETING_BYTES) for source, target in pairs)
        sources = [move.source for move in moves]
        policies = POLICIES if len(set(sources)) < len(sources) else POLICIES[:1]
        named = f"{what}: " + ", ".join(f"{source} > {target}" for source, target in pairs)
        rows += [Row(named, Scenario(moves, repeats=repeats, policy=item)) for item in policies]
    return rows


def _reductions(repeats: int) -> list[Row]:
    groups = ((0, 1), (0, 2), (0, 1, 2), (0, 1, 2, 3))
    return [
        Row("all-reduce", Scenario(members=members, bytes_=bytes_, repeats=repeats))
        for members in groups
        for bytes_ in REDUCED_BYTES
    ]


def _cells(cluster: Cluster, row: Row, found: Times) -> list[object]:
    predicted = ends_by_the_rules(cluster, row.scenario.moves)
    ends = [found.median_s(place) for place in range(row.scenario.count)]
    policy = "-" if len(ends) == 1 else row.scenario.policy
    error = found.last_s / max(predicted) - 1
    return [row.what, policy, _milliseconds(predicted), _milliseconds(ends), f"{error:+.1%}"]


def _reduction_cells(cluster: Cluster, scenario: Scenario, found: Times) -> list[object]:
    devices = [cluster.device_names[rank] for rank in scenario.members]
    predicted = all_reduce_s(cluster, devices, scenario.bytes_)
    ratio = found.last_s / predicted
    members = ", ".join(str(rank) for rank in scenario.members)
    cells = (_milliseconds([predicted]), _milliseconds([found.last_s]), f"{ratio:.2f}")
    return [members, f"{scenario.bytes_:,}", *cells]


def _milliseconds(seconds: Sequence[float]) -> str:
    return ", ".join(f"{value * 1e3:.2f}" for value in seconds)
