"""Tables for a terminal: one look for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def new_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """A table in the look of all of them: columns of words, then columns of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for word in words:
        table.add_column(word, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def plain(text: str) -> str:
    """A name as it is: brackets in it are no markup."""
    from rich.markup import escape

    return escape(text)
