"""Plain JSON values as tables, whatever they hold: units are read off the names of the fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from planner.report.html.markup import Child, Column, details, table, terms
from planner.report.names import compress_devices
from planner.units import format_bytes, format_seconds, plural

MOST_WORDS = 16
"""Of a list in a cell; the rest is counted."""
MOST_LETTERS = 300
"""Of anything else in a cell."""
_SHARES = frozenset(("share", "gain", "gap", "bubble", "error"))
_UNITS = ("_s", "_bytes")


def data_blocks(data: Mapping[str, Any]) -> list[Element]:
    """Every field of an object: single values as one list, the others as a table to open each."""
    single = {name: value for name, value in data.items() if not _is_block(value)}
    blocks = [data_terms(single)] if single else []
    for name, value in data.items():
        if _is_block(value):
            blocks.append(details(field_words(name).capitalize(), *_block(name, value)))
    return blocks


def data_terms(data: Mapping[str, Any]) -> Element:
    """Single values by name."""
    return terms((field_words(name), value_text(name, value)) for name, value in data.items())


def data_table(caption: str, rows: Sequence[Mapping[str, Any]]) -> Element:
    """Objects as rows, below their name; the columns are all fields that occur, in order."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [
        Column(field_words(name), all(_is_number(row.get(name)) for row in rows)) for name in names
    ]
    cells: list[list[Child]] = [[value_text(name, row.get(name)) for name in names] for row in rows]
    return table(caption, columns, cells, is_named_above=True)


def field_words(name: str) -> str:
    """A field's name without its unit, as words."""
    for unit in _UNITS:
        name = name.removesuffix(unit)
    return name.replace("_", " ").strip() or name


def value_text(name: str, value: Any) -> str:
    """A value in the unit that its field's name tells; a dash where there is none."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case int() | float():
            return _number_text(name, value)
        case list() | tuple() if all(isinstance(item, str | int) for item in value):
            return _list_text([str(item) for item in value])
        case list() | tuple() if all(isinstance(item, Mapping) for item in value):
            return _rows_text(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"


def _number_text(name: str, value: float) -> str:
    if name.endswith("_s") or name == "seconds":
        return f"-{format_seconds(-value)}" if value < 0 else format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if not _SHARES.isdisjoint(name.split("_")):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _list_text(items: list[str]) -> str:
    text = compress_devices(items[:MOST_WORDS]) or "-"
    more = len(items) - MOST_WORDS
    return f"{text}, … ({plural(more, 'more', '')})" if more > 0 else text


def _rows_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Objects inside a cell: their values, and the names of those that are bare numbers."""
    texts = (
        " ".join(_named_text(name, value) for name, value in row.items() if value not in (None, []))
        for row in rows[:MOST_WORDS]
    )
    more = len(rows) - MOST_WORDS
    return "; ".join(texts) + (f"; … ({plural(more, 'more', '')})" if more > 0 else "")


def _named_text(name: str, value: Any) -> str:
    text = value_text(name, value)
    return f"{field_words(name)} {text}" if text[:1].isdigit() and text[-1].isdigit() else text


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_block(value: Any) -> bool:
    """Whether a value needs more room than a line."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _block(name: str, value: Any) -> list[Element]:
    if isinstance(value, Mapping):
        if value and all(isinstance(row, Mapping) for row in value.values()):
            rows = [{"of": key, **row} for key, row in value.items()]
            return [data_table(field_words(name), rows)]
        return data_blocks(value)
    rows = [dict(row) if isinstance(row, Mapping) else {name: row} for row in value]
    return [data_table(field_words(name), rows)]
