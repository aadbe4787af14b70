"""The page of results: medians, ratios of builds, the worst rows, and time to quality."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.harness import heading, table
from benchmarks.plans.cases import Case
from benchmarks.plans.runs import Row, Series

WORST = 8
"""Rows of the table of the worst ones."""
MOMENTS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
REACHED = {"tiny": 1e-4, "schedules": 2e-3}
"""Share by which a time may exceed the known one, which is rounded, by group."""
NARROWER = 5e-3
"""Share by which a narrower space may have the faster plan."""
NONE = float("inf")
COLUMNS = (
    *("group", "problems", "CPU s", "build", "ratio", "worst", "most CPU s", "no plan"),
    *("gap, median", "known reached", "proved", "do not hold"),
)


class Results:
    """Rows by problem, limit and series.

    Args:
        cases: the problems.
        series: what is compared; the last one is what the others are compared with.
        rows: of all runs.
    """

    def __init__(self, cases: Sequence[Case], series: Sequence[Series], rows: Sequence[Row]):
        self.cases, self.series = cases, series
        self.limits = sorted({row["seconds"] for row in rows})
        self.seeds = len({row["seed"] for row in rows})
        self._rows: dict[tuple[str, float, str, tuple[str, ...]], list[Row]] = {}
        for row in rows:
            key = row["problem"], row["seconds"], row["build"], tuple(row["without"])
            self._rows.setdefault(key, []).append(row)

    def of(self, case: Case, limit_s: float, one: Series) -> list[Row]:
        """Return the rows of all seeds."""
        return self._rows.get((case.name, limit_s, one.digest, one.without), [])

    def time_s(self, case: Case, limit_s: float, one: Series) -> float:
        """Return the median iteration time; infinity if no plan was found."""
        times = [row.get("time_s", NONE) for row in self.of(case, limit_s, one)]
        return statistics.median(times) if times else NONE

    def gap(self, case: Case, limit_s: float, one: Series) -> float:
        """Return the median of iteration time / bound - 1; infinity without a bound."""
        pairs = [(row.get("time_s"), row.get("bound_s")) for row in self.of(case, limit_s, one)]
        gaps = [time / bound - 1 for time, bound in pairs if time and bound]
        return statistics.median(gaps) if gaps else NONE

    def ratio(self, case: Case, limit_s: float, one: Series) -> float:
        """Return the time over that of the last series; below 1 if it is faster."""
        mine, other = self.time_s(case, limit_s, one), self.time_s(case, limit_s, self.series[-1])
        return mine / other if other < NONE else (0.0 if mine < NONE else 1.0)

    def best_after_s(self, case: Case, moment_s: float, one: Series) -> float:
        """Return the median over seeds of the best time that was known after so many CPU seconds.

        It is read from the longest runs.
        """
        found = []
        for row in self.of(case, self.limits[-1], one):
            curve = row.get("curve", [])
            found.append(min((time for at, time, _ in curve if at <= moment_s), default=NONE))
        return statistics.median(found) if found else NONE

    def best_s(self, case: Case) -> float:
        """Return the least median of all builds' longest runs."""
        return min(self.time_s(case, self.limits[-1], one) for one in self.series)

    def after(self, moment_s: float, one: Series) -> list[float]:
        """Return the best times after a moment over the best of all runs, where there is a plan."""
        pairs = [(self.best_after_s(case, moment_s, one), self.best_s(case)) for case in self.cases]
        return [after_s / best_s for after_s, best_s in pairs if after_s < NONE and best_s < NONE]

    def is_reached(self, case: Case, limit_s: float, one: Series) -> bool:
        """Return whether the known time of a problem was reached, or a conflict named."""
        if case.conflict:
            told = [row.get("error") or "" for row in self.of(case, limit_s, one)]
            return all(
                words.startswith("InfeasibleError: ")
                and any(name in words for name in case.conflict)
                for words in told
            )
        tolerance = 1 + REACHED.get(case.group, 0.0)
        return case.known_s is not None and self.time_s(case, limit_s, one) <= (
            tolerance * case.known_s
        )

    def groups(self) -> Iterator[tuple[str, list[Case]]]:
        """Yield groups with their problems, and all of them at last."""
        names = dict.fromkeys(case.group for case in self.cases)
        for name in names:
            yield name, [case for case in self.cases if case.group == name]
        if len(names) > 1:
            yield "all", list(self.cases)


def report(command: str, results: Results) -> str:
    """Return the page."""
    cases, series, seeds = results.cases, results.series, results.seeds
    names = ", ".join(f"{one.name} ({one.digest})" for one in series)
    parts = [
        heading("Plans", command),
        f"{len(cases)} problems, {seeds} random seeds, medians; {names}. Limits and times are CPU "
        "seconds of all threads, without the start of Python. Ratios are iteration times over "
        f"those of {series[-1].name}, geometric means; below 1 is faster. A plan holds if its "
        "build's verifier accepts it, and the simulators of both builds agree on its time where "
        "the other reads its format; a bound is proved if `verify --prove` accepts its "
        "certificate.\n",
        "## By group\n",
        table(
            COLUMNS,
            [*_group_rows(results)],
        ),
    ]
    if len(series) > 1:
        parts += ["## The worst ratios\n", _worst(results)]
    if any(case.wider for case in cases):
        parts += ["## A narrower space with the faster plan\n", _narrower(results)]
    return "\n".join([*parts, "## Best plan after so many CPU seconds\n", _curves(results)])


def _group_rows(results: Results) -> Iterator[list[object]]:
    for group, cases in results.groups():
        for limit_s in results.limits:
            for one in results.series:
                rows = [row for case in cases for row in results.of(case, limit_s, one)]
                if rows:
                    cells = _cells(results, cases, limit_s, one, rows)
                    yield [group, len(cases), f"{limit_s:g}", one.name, *cells]


def _cells(
    results: Results, cases: list[Case], limit_s: float, one: Series, rows: list[Row]
) -> list[object]:
    both = [results.ratio(case, limit_s, one) for case in cases]
    ratios = [ratio for ratio in both if 0 < ratio < NONE]
    gaps = [results.gap(case, limit_s, one) for case in cases]
    known = [case for case in cases if case.known_s is not None or case.conflict]
    reached = sum(results.is_reached(case, limit_s, one) for case in known)
    with_plan = [row for row in rows if "time_s" in row]
    return [
        f"{statistics.geometric_mean(ratios):.4f}" if ratios else "-",
        f"{max(ratios):.3f}" if ratios else "-",
        f"{max(row.get('cpu_s', 0.0) for row in rows):.1f}",
        len(rows) - len(with_plan),
        f"{statistics.median(gaps):.1%}" if min(gaps) < NONE else "-",
        f"{reached} of {len(known)}" if known else "-",
        f"{sum(row.get('is_proved', False) for row in with_plan)} of {len(with_plan)}",
        sum(not holds(row) for row in with_plan),
    ]


def holds(row: Row) -> bool:
    """Return whether the verifier accepted a plan, and the other simulator agrees on its time."""
    judged_s = row.get("judge_judged_s")
    return not row.get("problems") and (
        judged_s is None or abs(judged_s / row["time_s"] - 1) <= 1e-6
    )


def _worst(results: Results) -> str:
    rows = [
        (results.ratio(case, limit_s, one), case, limit_s, one)
        for case in results.cases
        for limit_s in results.limits
        for one in results.series[:-1]
        if results.of(case, limit_s, one)
    ]
    rows.sort(key=lambda row: -row[0])
    cells = [
        [
            case.name,
            f"{limit_s:g}",
            one.name,
            _ms(results.time_s(case, limit_s, one)),
            _ms(results.time_s(case, limit_s, results.series[-1])),
            f"{ratio:.4f}",
        ]
        for ratio, case, limit_s, one in rows[:WORST]
    ]
    return table(
        ("problem", "CPU s", "build", "ms", f"{results.series[-1].name}, ms", "ratio"), cells
    )


def _narrower(results: Results) -> str:
    by_name = {case.name: case for case in results.cases}
    pairs = [(by_name[case.wider], case) for case in results.cases if case.wider in by_name]
    cells = []
    for limit_s in results.limits:
        for one in results.series:
            worse = [
                narrow.name
                for wide, narrow in pairs
                if results.time_s(wide, limit_s, one)
                > (1 + NARROWER) * results.time_s(narrow, limit_s, one)
            ]
            count = f"{len(worse)} of {len(pairs)}"
            cells.append([f"{limit_s:g}", one.name, count, "; ".join(worse)])
    return table(("CPU s", "build", "pairs", "narrower spaces"), cells)


def _curves(results: Results) -> str:
    cells = []
    moments = [moment_s for moment_s in MOMENTS_S if moment_s <= results.limits[-1]]
    for one in results.series:
        ratios = [results.after(moment_s, one) for moment_s in moments]
        means = [f"{statistics.geometric_mean(row):.3f}" if row else "-" for row in ratios]
        counts = [f"{mean} ({len(row)})" for mean, row in zip(means, ratios, strict=True)]
        cells.append([one.name, *counts])
    return (
        "Over the best plan of all builds' longest runs, geometric mean of the problems (their "
        "number) that have a plan by then.\n\n"
        + table(("build", *(f"{moment_s:g} s" for moment_s in moments)), cells)
    )


def _ms(seconds: float) -> str:
    return "no plan" if seconds == NONE else f"{seconds * 1e3:.2f}"
