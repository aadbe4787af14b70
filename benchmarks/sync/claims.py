"""Bars, what was measured against them, and the tables of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.reporting.report import table
from benchmarks.sync.figures import Compared, Runs, Spread, compare, json_line
from benchmarks.sync.settings import OVERLAPPED, PLAIN, SEMI, WAITING

EQUAL_LOSS = 1.01
"""Held-out losses up to this ratio count as equal."""
CLAIM_COLUMNS = ("claim", "regime", "runs", "bar", "measured (min..max)", "verdict")
RUN_COLUMNS = (
    *("setting", "strategy", "shares/s", "against all-reduce", "against overlapped"),
    *("to the loss, against overlapped", "held-out loss, over overlapped's"),
)


@dataclass(frozen=True)
class Claim:
    """A figure of a paper, and ours.

    Attributes:
        text: what is claimed.
        regime: model, links and slowness for which it was measured.
        is_real: processes over gloo; otherwise the simulator.
        bar: what has to be reached.
        found: over the seeds; None: not known, since a run did not get there.
        at_most: the bar is an upper one.
        loss: held-out loss after equal work, over the rival's; None: the claim compares times or
            iterations to one held-out loss, or no trainings at all.
        note: why it was not reached, or what reached it.
    """

    text: str
    regime: str
    is_real: bool
    bar: float
    found: Spread | None
    at_most: bool = False
    note: str = ""
    loss: Spread | None = None

    @property
    def has_equal_loss(self) -> bool:
        """Whether what is faster learns as well: otherwise the figure says nothing."""
        return self.loss is None or self.loss.mean <= EQUAL_LOSS

    @property
    def is_reached(self) -> bool:
        """Whether the mean over the seeds reaches the bar, at a held-out loss that is equal."""
        if self.found is None or not self.has_equal_loss:
            return False
        mean = self.found.mean
        return mean <= self.bar if self.at_most else mean >= self.bar

    def row(self) -> list[str]:
        """The row of the table."""
        sign = "<=" if self.at_most else ">="
        verdict = "reached" if self.is_reached else "**not reached**"
        found = "no run got there" if self.found is None else str(self.found)
        runs = "real" if self.is_real else "simulated"
        note = f" {self.note}" if self.note else ""
        if not self.has_equal_loss:
            note += f", at {self.loss} of the rival's held-out loss"
        return [self.text, self.regime, runs, f"{sign} {self.bar:g}", found, verdict + note]


@dataclass(frozen=True)
class Outcome:
    """The results of a section of the report.

    Attributes:
        claims: in order.
        columns, rows: of its table, below the claims.
        lines: for ``--json``.
        note: below the tables.
    """

    claims: Sequence[Claim] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[Mapping[str, Any]] = field(default=())
    note: str = ""

    def markdown(self) -> str:
        """Both tables and the note."""
        parts = []
        if self.claims:
            parts.append(table(CLAIM_COLUMNS, [claim.row() for claim in self.claims]))
        if self.rows:
            parts.append(table(self.columns, self.rows))
        if self.note:
            parts.append(f"{self.note}\n")
        return "\n".join(parts)


def rates_note(trained: Mapping[str, Mapping[str, float]], tried: Sequence[float]) -> str:
    """Return the sentence that tells learning rates.

    Args:
        trained: the chosen ones by strategy, by what they were chosen in.
        tried: all of them.
    """
    told = []
    for where, rates in trained.items():
        by_rate: dict[float, list[str]] = {}
        for strategy, rate in rates.items():
            by_rate.setdefault(rate, []).append(f"`{strategy}`")
        groups = [f"{rate:g}: {', '.join(names)}" for rate, names in sorted(by_rate.items())]
        told.append(f"{where}, {'; '.join(groups)}.")
    of = ", ".join(f"{rate:g}" for rate in tried)
    return f"Learning rates, of {of}: {' '.join(told)}"


def run_rows(setting: str, runs: Runs) -> list[list[str]]:
    """Every strategy of a setting, in :data:`RUN_COLUMNS`."""
    rows = []
    for strategy, mine in runs.items():
        plain, over = compare(runs, strategy, PLAIN), compare(runs, strategy, OVERLAPPED)
        rate = Spread(tuple(run.shares_per_s for run in mine))
        rows.append(
            [
                *(setting, f"`{strategy}`", f"{rate.mean:.1f}"),
                *(str(plain.throughput), str(over.throughput)),
                "not there" if over.time_to_loss is None else str(over.time_to_loss),
                f"{over.final_loss.mean:.4f}",
            ]
        )
    return rows


def run_lines(setting: str, runs: Runs, *, is_real: bool) -> list[dict[str, Any]]:
    """Every strategy of a setting against all-reduce that does not overlap."""
    kind = "real" if is_real else "simulated"
    lines = []
    for strategy in runs:
        over = compare(runs, strategy, OVERLAPPED).throughput.mean
        more = {"runs": kind, "overlapped_ratio": round(over, 4)}
        lines.append(json_line(strategy, setting, compare(runs, strategy, PLAIN), **more))
    return lines


def best(runs: Runs, strategies: Sequence[str], rival: str) -> tuple[str, Compared]:
    """Return the strategy that commits most shares a second, against a rival.

    Those that learn as well as the rival come before those that do not.
    """
    there = [strategy for strategy in strategies if strategy in runs]
    found = {strategy: compare(runs, strategy, rival) for strategy in there}
    equal = {name: row for name, row in found.items() if row.final_loss.mean <= EQUAL_LOSS}
    return max((equal or found).items(), key=lambda item: item[1].throughput.mean)


def extremes(
    text: str,
    rows: Sequence[tuple[str, Spread | None, Spread | None]],
    bar: float,
    least: float = 0.0,
    *,
    is_real: bool = False,
) -> list[Claim]:
    """Return the best regime against the bar, and the worst against ``least``.

    Args:
        text: of both claims.
        rows: each regime in words, its figure (None: no run got there), and the held-out loss after
            equal work over the rival's (None: the figure compares trainings up to one loss).
        bar: what the best has to reach.
        least: what the worst has to reach.
        is_real: whether processes ran; otherwise the simulator did.
    """
    known = [(found, regime, loss) for regime, found, loss in rows if found is not None]
    if not known:
        return [Claim(text, "all of them", is_real, bar, None)]
    high = max(known, key=lambda pair: pair[0].mean)
    low = min(known, key=lambda pair: pair[0].mean)
    missing = len(rows) - len(known)
    note = f"({missing} more where no run got there)" if missing else ""
    return [
        Claim(f"{text}: best", high[1], is_real, bar, high[0], loss=high[2]),
        Claim(f"{text}: worst", low[1], is_real, least, low[0], note=note, loss=low[2]),
    ]


def ceiling(workers: int, factor: float) -> float:
    """Return the largest possible throughput over all-reduce's with one slow worker."""
    return (workers - 1 + 1 / factor) * factor / workers


def against_all(runs: Runs, ours: str, regime: str, *, is_real: bool) -> Iterator[Claim]:
    """A form of semi_decentralized against every other strategy, and its final loss."""
    others = [name for name in runs if not name.startswith(SEMI)]
    waiting = [name for name in WAITING if name in runs]
    for told, rivals in (
        ("any other strategy", others),
        ("those whose workers wait for each other", waiting),
    ):
        found = {name: compare(runs, ours, name, OVERLAPPED).time_to_loss for name in rivals}
        known = {name: spread for name, spread in found.items() if spread is not None}
        fastest = min(known, key=lambda name: known[name].mean, default="")
        told = f"time to the loss, `{ours}` over the fastest of {told}"
        note = f"({fastest}, of {len(rivals)})" if fastest else ""
        yield Claim(told, regime, is_real, 1.0, known.get(fastest), note=note)
    values = compare(runs, ours, OVERLAPPED).final_loss.values
    off = Spread(tuple(abs(value - 1) for value in values))
    told = f"distance of `{ours}`'s final loss from all-reduce's"
    yield Claim(told, regime, is_real, 0.01, off, at_most=True)
