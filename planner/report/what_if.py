"""Effect of changes: a table, lines and plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.analysis.what_if.case import Way
from planner.analysis.what_if.values import LEAST_GAIN, Value, WhatIf
from planner.report.tables import new_table, plain
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from rich.table import Table

LEAST_SHARE = 0.0005
"""A smaller one would be shown as 0.0%."""
FOUND_BY: dict[Way | None, str] = {
    "same plan replayed": "replay",
    "same stages, scheduled anew": "scheduling",
    "solved anew": "solving",
    "as it is": "-",
}
"""Short, for the table."""
WORDS, NUMBERS = ("change", "found by"), ("iteration", "vs now", "at best")
"""What a row of the table tells."""


def what_if_table(found: WhatIf) -> Table:
    """Return a table with one row per change, the largest gain first."""
    title = "Effect of changes, compared with " + format_seconds(found.base_s)
    table = new_table(title, WORDS, NUMBERS)
    for value in found.values:
        change, *others = value_cells(value)
        table.add_row(plain(change), *others)
    return table


def value_cells(value: Value) -> list[str]:
    """Return a value as text, by :data:`WORDS` and :data:`NUMBERS`."""
    if value.iteration_time_s is None or value.gain is None:
        return [value.change, "-", "does not fit", "-", _at_best(value)]
    return [
        value.change,
        FOUND_BY[value.found_by],
        format_seconds(value.iteration_time_s),
        signed_change(value.gain),
        _at_best(value),
    ]


def signed_change(gain: float) -> str:
    """Return by how much a time changes, such as ``-1.8%``, from the share that is saved."""
    return f"{-gain:+.1%}" if abs(gain) >= LEAST_SHARE else "0"


def _at_best(value: Value) -> str:
    most = most_saved(value)
    return "-" if most is None else f"{signed_change(most[0])}{most[1]}"


def most_saved(value: Value) -> tuple[float, str] | None:
    """Return the largest possible saving that is proved, and its mark.

    Returns:
        No mark if it is of any plan, else a star: of the same stages.
    """
    for most, mark in ((value.most_gain, ""), (value.most_gain_of_stages, "*")):
        if most is not None:
            return most, mark
    return None


def what_if_lines(found: WhatIf) -> list[str]:
    """Return lines that explain the table's figures and what is proved."""
    lines = []
    if found.base_s < found.plan_s * (1 - LEAST_SHARE):
        lines.append(
            f"the unchanged plan can take {format_seconds(found.base_s)}, "
            f"{1 - found.base_s / found.plan_s:.1%} less than its {format_seconds(found.plan_s)} "
            f"({found.base_found_by}); gains are counted from {format_seconds(found.base_s)}"
        )
    if found.values:
        lines.append(_ways_line(found))
    covers = [value.bound_covers for value in found.values if value.bound_covers is not None]
    if covers:
        lines.append(f"any plan: {covers[0]}")
    lines += _proved_lines(found)
    lines += [f"{value.change} assumes {value.assumes}" for value in found.values if value.assumes]
    if found.left_out:
        lines.append(
            f"{plural(found.left_out, 'change')} skipped to save time; --what-if includes them"
        )
    if found.interrupted:
        lines.append("interrupted: the values are the best found so far")
    return lines


def _ways_line(found: WhatIf) -> str:
    """Return what the words of the column ``found by`` mean."""
    ways = "found by: replay of the same plan, or a new schedule of its stages"
    if not found.solved_anew:
        return f"{ways}; --what-if searches for new stages; at best*: any schedule of these stages"
    return f"{ways}, or a new search; at best: any plan (*: any schedule of these stages)"


def _proved_lines(found: WhatIf) -> list[str]:
    """Return lines on changes that are proved to save nothing."""
    rows = {
        f"proved to save at most {LEAST_GAIN:.1%} with any plan": "any plan",
        f"proved to save at most {LEAST_GAIN:.1%} with these stages": "same stages",
    }
    lines = []
    for text, useless in rows.items():
        names = [value.change for value in found.values if value.useless == useless]
        if names:
            lines.append(f"{text}: {'; '.join(names)}")
    return lines


def what_if_data(found: WhatIf) -> dict[str, Any]:
    """Return all values as plain data."""
    return {
        "plan_s": found.plan_s,
        "base_s": found.base_s,
        "base_found_by": found.base_found_by,
        "solved_anew": found.solved_anew,
        "left_out": found.left_out,
        "interrupted": found.interrupted,
        "values": [
            {
                **asdict(value),
                "most_gain": value.most_gain,
                "most_gain_of_stages": value.most_gain_of_stages,
            }
            for value in found.values
        ],
    }
