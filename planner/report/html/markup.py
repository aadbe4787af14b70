"""HTML elements with escaped text, and tables of any plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from planner.plan.operations import compress_devices
from planner.units import format_bytes, format_seconds, plural

Child = Element | str | None
MOST_ROWS = 200
"""Most rows of a table; the rest is counted."""


class Column(NamedTuple):
    """A table's column; numbers stand at the right."""

    heading: str
    is_number: bool = False


def node(tag: str, *children: Child, **attributes: str | float | None) -> Element:
    """An element.

    Args:
        tag: its name.
        children: elements and text; None is left out.
        attributes: ``class_`` stands for ``class``, ``aria_label`` for ``aria-label``; None is
            left out.
    """
    element = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), str(value))
    for child in children:
        _append(element, child)
    return element


def _append(element: Element, child: Child) -> None:
    if child is None:
        return
    if isinstance(child, Element):
        element.append(child)
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + child
    else:
        element.text = (element.text or "") + child


def markup(*elements: Element) -> str:
    """Elements as HTML."""
    return "".join(
        ElementTree.tostring(element, encoding="unicode", method="html") for element in elements
    )


def code(text: str) -> Element:
    """A name or a command, apart from the direction of the text around it."""
    return node("code", text)


def section(identifier: str, heading: str, *children: Child) -> Element:
    """A section under a heading of the second level, which names it."""
    title = node("h2", heading, id=f"{identifier}-heading")
    return node("section", title, *children, id=identifier, aria_labelledby=f"{identifier}-heading")


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Child]],
    *,
    most: int = MOST_ROWS,
    is_named_above: bool = False,
) -> Element:
    """A table in a frame that scrolls sideways where it is wider than the page.

    Args:
        caption: names the table, and its frame.
        columns: as many as a row has cells; the first cell of a row is its heading.
        rows: of cells; of more than ``most`` the rest is counted below.
        most: rows to show.
        is_named_above: whether the caption would only say once more what stands above the table.
    """
    heads = [
        node("th", column.heading, scope="col", class_=_class_of(column)) for column in columns
    ]
    body = [node("tr", *_cells(columns, row)) for row in rows[:most]]
    found = node(
        "table",
        node("caption", caption, class_="hidden" if is_named_above else None),
        node("thead", node("tr", *heads)),
        node("tbody", *body),
    )
    frame = node("div", found, class_="frame", role="region", tabindex=0, aria_label=caption)
    if len(rows) > most:
        rest = node("p", f"and {len(rows) - most:,} more", class_="note")
        return node("div", frame, rest)
    return frame


def _cells(columns: Sequence[Column], row: Sequence[Child]) -> Iterable[Element]:
    for place, (column, cell) in enumerate(zip(columns, row, strict=True)):
        if place == 0:
            yield node("th", cell, scope="row", class_=_class_of(column))
        else:
            yield node("td", cell, class_=_class_of(column))


def _class_of(column: Column) -> str | None:
    return "number" if column.is_number else None


def details(summary: str, *children: Child) -> Element:
    """Something that is shown when asked for."""
    return node("details", node("summary", summary), *children)


def terms(rows: Iterable[tuple[str, Child]]) -> Element:
    """A list of names with what they stand for."""
    pairs = [node("div", node("dt", name), node("dd", value)) for name, value in rows]
    return node("dl", *pairs)


MOST_WORDS = 16
"""Most entries of a list in a cell; the rest is counted."""
MOST_LETTERS = 300
"""Most characters of anything else in a cell."""
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
    """Return whether a value needs more room than a line."""
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
