"""What changes would give, as a table, a few lines and plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.report.tables import new_table, plain
from planner.units import format_seconds, plural
from planner.what_if.case import Way
from planner.what_if.values import LEAST_GAIN, Value, WhatIf

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
    """One line a change, the most gain first."""
    title = "What changes would give, against " + format_seconds(found.base_s)
    table = new_table(title, WORDS, NUMBERS)
    for value in found.values:
        change, *others = value_cells(value)
        table.add_row(plain(change), *others)
    return table


def value_cells(value: Value) -> list[str]:
    """A value as text, by :data:`WORDS` and :data:`NUMBERS`."""
    if value.iteration_time_s is None or value.gain is None:
        return [value.change, "-", "does not fit", "-", _at_best(value)]
    return [
        value.change,
        FOUND_BY[value.found_by],
        format_seconds(value.iteration_time_s),
        _change(value.gain),
        _at_best(value),
    ]


def _change(gain: float) -> str:
    return f"{-gain:+.1%}" if abs(gain) >= LEAST_SHARE else "0"


def _at_best(value: Value) -> str:
    most = most_saved(value)
    return "-" if most is None else f"{_change(most[0])}{most[1]}"


def most_saved(value: Value) -> tuple[float, str] | None:
    """The share that is proved to be the most it can save, and the mark of what it is proved for.

    Returns:
        No mark if it is of any plan, else a star: of the same stages.
    """
    for most, mark in ((value.most_gain, ""), (value.most_gain_of_stages, "*")):
        if most is not None:
            return most, mark
    return None


def what_if_lines(found: WhatIf) -> list[str]:
    """What the table's figures mean, and what is proved; below it."""
    lines = []
    if found.base_s < found.plan_s * (1 - LEAST_SHARE):
        lines.append(
            f"without any change {format_seconds(found.base_s)} were found, "
            f"{1 - found.base_s / found.plan_s:.1%} less than the plan's "
            f"{format_seconds(found.plan_s)} ({found.base_found_by}); gains count from there"
        )
    if found.values:
        lines.append(_ways_line(found))
    covers = [value.bound_covers for value in found.values if value.bound_covers is not None]
    if covers:
        lines.append(f"any plan: {covers[0]}")
    lines += _proved_lines(found)
    lines += [f"{value.change} assumes {value.assumes}" for value in found.values if value.assumes]
    if found.left_out:
        lines.append(f"{plural(found.left_out, 'change')} left out to be quick; see --what-if")
    if found.interrupted:
        lines.append("interrupted: values are what was found until then")
    return lines


def _ways_line(found: WhatIf) -> str:
    """What the table's words stand for."""
    ways = "found by replay of the same plan, or by scheduling its stages anew"
    if not found.solved_anew:
        return f"{ways}; --what-if solves anew; at best*: any schedule of these stages"
    return f"{ways}, or by solving anew; at best: any plan (*: any schedule of these stages)"


def _proved_lines(found: WhatIf) -> list[str]:
    """Changes that are proved to give nothing."""
    rows = {
        f"proved to gain no more than {LEAST_GAIN:.1%} with any plan": "any plan",
        f"proved to gain no more than {LEAST_GAIN:.1%} with these stages": "same stages",
    }
    lines = []
    for text, useless in rows.items():
        names = [value.change for value in found.values if value.useless == useless]
        if names:
            lines.append(f"{text}: {'; '.join(names)}")
    return lines


def what_if_data(found: WhatIf) -> dict[str, Any]:
    """Everything that was found, as JSON values."""
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
