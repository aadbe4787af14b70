"""The section of what changes would give: a table with a bar for each, and every figure."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from planner.report.html.markup import Child, Column, details, node, section, table
from planner.report.html.plain_data import data_table, data_terms
from planner.report.what_if import (
    LEAST_SHARE,
    NUMBERS,
    WORDS,
    most_saved,
    value_cells,
    what_if_data,
    what_if_lines,
)
from planner.units import format_seconds
from planner.what_if import Value, WhatIf

_BAR, _HIGH = 160, 12
"""Pixels of a bar: its width if it is the longest, and its height."""
_COLUMNS = (
    *(Column(word) for word in WORDS),
    *(Column(number, True) for number in NUMBERS),
    Column("saved, filled; at best, outlined"),
)


def what_if_section(found: WhatIf | None) -> Element:
    """What changes would give, the most gain first.

    Args:
        found: None if the plan overflows memory, so that there is nothing to compare with.
    """
    return section("what-if", "What changes would give", *_contents(found))


def _contents(found: WhatIf | None) -> list[Child]:
    if found is None:
        return [node("p", "The plan overflows memory, so no change can be compared with it.")]
    if not found.values:
        return [node("p", "There is no change to ask for.")]
    scale = max(max(_saved(value), _at_best(value)) for value in found.values)
    rows: list[list[Child]] = [[*value_cells(value), _bar(value, scale)] for value in found.values]
    caption = f"Against {format_seconds(found.base_s)} without any change"
    return [
        table(caption, _COLUMNS, rows),
        node("ul", *(node("li", line) for line in what_if_lines(found)), class_="note"),
        _every_figure(found),
    ]


def _every_figure(found: WhatIf) -> Element:
    data = what_if_data(found)
    rows = data.pop("values")
    return details("Every figure", data_terms(data), data_table("values of changes", rows))


def _bar(value: Value, scale: float) -> Element:
    """What is saved as a filled bar within what could be; the cells beside it tell the figures."""
    return node(
        "svg",
        _box("at-best", _at_best(value), scale),
        _box("saved", _saved(value), scale),
        class_="bar",
        width=_BAR + 2,
        height=_HIGH + 2,
        aria_hidden="true",
    )


def _box(kind: str, share: float, scale: float) -> Element | None:
    if share < LEAST_SHARE:
        return None
    width = round(_BAR * share / scale, 2)
    return node("rect", class_=kind, x=1, y=1, width=width, height=_HIGH)


def _saved(value: Value) -> float:
    """The share that was found; none by a change that costs or does not fit."""
    return max(0.0, value.gain or 0.0)


def _at_best(value: Value) -> float:
    """The share that it can save at most, where that is proved."""
    most = most_saved(value)
    return 0.0 if most is None else most[0]
