"""Markup as a tree of elements: text is escaped where it is written, so no name becomes markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Child = Element | str | None
MOST_ROWS = 200
"""Of a table; the rest is counted."""


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
