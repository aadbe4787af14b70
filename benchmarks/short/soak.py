"""Claims about pipelines that die and stop, from any rows of that benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks import soak as full
from benchmarks.claims import Claim, Entry, LeftOut, details, met
from benchmarks.soak_figures import DETECTION_BAR_S, LEAST_BAR_S, REJOIN_BAR_S
from benchmarks.soak_world import GROUP_TIMEOUT_S

OURS = "our own bar"
_OTHERS = (
    "gaps between steps of pipelines that have nothing to exchange with a silent rank: within "
    f"max(3 iterations, {LEAST_BAR_S:g} s)"
)
_MEMBERS = (
    "gaps between steps of pipelines that wait for a silent rank: within the group timeout of "
    f"{GROUP_TIMEOUT_S:g} s and {LEAST_BAR_S:g} s"
)


def entries(rows: Sequence[full.Row]) -> Iterator[Entry]:
    """Claims and the table of rows."""
    events = sum(row.kills + row.stops + row.coordinators for row in rows)
    regime = f"{len(rows)} strategies, {events} kills and stops"
    for claim, good in (
        ("strategies that train on while ranks are killed and stopped", _goes_on),
        ("strategies with every share committed exactly once", lambda row: not row.faults),
    ):
        yield met(claim, OURS, sum(map(good, rows)), len(rows), regime=regime)
    yield _gaps(_OTHERS, rows, lambda row: (row.others_s, row.others_bar_s))
    yield _gaps(_MEMBERS, rows, lambda row: (row.members_s, row.members_bar_s))
    yield _longest("detecting a killed rank", [s for row in rows for s in row.detection_s], True)
    yield _longest("rejoining, from hello", [s for row in rows for s in row.rejoin_s], False)
    yield details("Soak", full.COLUMNS, [row.cells() for row in rows])
    left = [name for name in full.STRATEGIES if name not in {row.case.strategy for row in rows}]
    if left:
        yield LeftOut(text="strategies " + ", ".join(left))
    yield LeftOut(text="most of the events")
    yield LeftOut(text="pipelines of two places and restarts by torchrun")


def _goes_on(row: full.Row) -> bool:
    return not (row.hung or row.strange)


def _gaps(
    claim: str,
    rows: Sequence[full.Row],
    gaps: Callable[[full.Row], tuple[Sequence[float], float]],
) -> Claim:
    pairs = [(gap_s, bar_s) for row in rows for gaps_s, bar_s in (gaps(row),) for gap_s in gaps_s]
    within = sum(gap_s <= bar_s for gap_s, bar_s in pairs)
    longest = max((gap_s for gap_s, _ in pairs), default=0.0)
    return met(claim, OURS, within, len(pairs), note=f"longest {longest:.2f} s")


def _longest(claim: str, seconds: Sequence[float], is_detection: bool) -> Claim:
    bar_s = DETECTION_BAR_S if is_detection else REJOIN_BAR_S
    told = f"{claim}: longest"
    if not seconds:
        return Claim(claim=told, source=OURS, not_run="it did not happen in so few events")
    regime = f"{len(seconds)} times"
    figures = {"sense": "at most", "bar": bar_s, "figure": max(seconds), "unit": "s"}
    return Claim.model_validate({"claim": told, "source": OURS, "regime": regime, **figures})
