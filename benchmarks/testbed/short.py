"""The testbed in a minute: single messages on the pairs of one cluster, two of each size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.catalogue import TESTBED_LONG_BAR, TESTBED_LONG_S, TESTBED_SHORT_BAR
from benchmarks.reporting.claims import Claim, Entry, LeftOut, details, met
from benchmarks.testbed.check import CHECK_COLUMNS, WORTHS_S, PairCheck, check, check_cells
from benchmarks.testbed.network import Testbed, why_not
from planner import Cluster

FILE = Path(__file__).parent / "clusters" / "uniform.toml"
REPEATS = 3
RULE = "the simulator's rule: latency + bytes / bandwidth, both as measured on the link"
_LONG = "a message alone takes what the rule says, within 3 % from 6 ms on"
_SHORT = "a message alone takes what the rule says, within 7 % from 2 to 6 ms"
_WIDTH = "measured bandwidth over the cluster file's, less one: most"


def entries() -> Iterator[Entry]:
    """Claims and a table; where the machine cannot have a testbed, the reason."""
    reason = why_not()
    if reason is not None:
        for claim, source in ((_LONG, RULE), (_SHORT, RULE), (_WIDTH, "the cluster file")):
            yield Claim(claim=claim, source=source, not_run=reason)
        return
    cluster = Cluster.load(FILE)
    with Testbed(cluster) as testbed:
        found = check(testbed, REPEATS)
    yield from _claims(cluster, found)
    yield details(f"The testbed {FILE.stem}", CHECK_COLUMNS, check_cells(cluster, found))
    yield LeftOut(text="the other clusters")
    yield LeftOut(text="messages that meet")
    yield LeftOut(text="all-reduces")


def _claims(cluster: Cluster, found: Sequence[PairCheck]) -> Iterator[Claim]:
    regime = f"{len(found)} pairs of {cluster.name}, gloo, medians of {REPEATS}"
    for claim, bar, is_long in (
        (_LONG, TESTBED_LONG_BAR, True),
        (_SHORT, TESTBED_SHORT_BAR, False),
    ):
        off = [
            abs(error)
            for pair in found
            for worth_s, error in zip(WORTHS_S, rule_errors(pair), strict=True)
            if (worth_s >= TESTBED_LONG_S) == is_long
        ]
        kept = sum(error <= bar for error in off)
        yield met(claim, RULE, kept, len(off), regime=regime, note=f"worst {max(off):.1%}")
    widths = []
    for pair in found:
        route = cluster.route(pair.source, pair.target)
        assert route is not None, "measured pairs are joined"
        widths.append(abs(pair.bandwidth_gb_per_s / route.bandwidth_gb_per_s - 1))
    source = "the cluster file"
    yield Claim(claim=_WIDTH, source=source, figure=max(widths), unit="%", regime=regime)


def rule_errors(pair: PairCheck) -> list[float]:
    """Return relative errors of the rule with measured figures, for each size but one byte."""
    rule = [pair.latency_s + size / (pair.bandwidth_gb_per_s * 1e9) for size in pair.bytes_[1:]]
    return [taken / said - 1 for taken, said in zip(pair.seconds[1:], rule, strict=True)]
