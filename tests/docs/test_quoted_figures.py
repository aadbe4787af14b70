"""Figures that README quotes from benchmarks are those of their rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

from builders import ROOT
from quoted_figures import QUOTED, Quoted

PAGES = {"README.md": (ROOT / "README.md").read_text(encoding="utf-8")}
SOURCE = re.compile(r"\]\([^)]*benchmarks/\w+\.md[^)]*\)|python -m benchmarks\.\w+")
HIDDEN = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)
"""Code, targets of links and comments: their numbers are no figures."""
NUMBER = re.compile(r"(?<![\w.,-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\w|-\w|[.,]\d)")
SENTENCE = re.compile(r"(?<=[.:?!])\s+(?=[A-Z`\[*-])")
WHAT_TO_DO = "tell in QUOTED of tests/docs/quoted_figures.py which rows have it, or leave it out"


def test_quoted_figures_are_those_of_the_reports() -> None:
    assert list(problems(PAGES, QUOTED)) == []


def problems(pages: Mapping[str, str], rows: Sequence[Quoted]) -> Iterator[str]:
    """Yield what is wrong with quoted figures: where, what, and the remedy."""
    covered: dict[str, set[int]] = {page: set() for page in pages}
    for row in rows:
        found = re.search(row.pattern, pages[row.page])
        if found is None:
            yield f"{row.page} no longer says {row.text!r}: change or remove its row in QUOTED"
            continue
        covered[row.page] |= {found.start(group) for group in range(1, found.re.groups + 1)}
        yield from disagreements(row, found)
    for page, text in pages.items():
        for start, figure, source in figures_beside_sources(text):
            if start not in covered[page]:
                yield f"{page}: {figure} is quoted from {source}: {WHAT_TO_DO}"


def disagreements(row: Quoted, found: re.Match[str]) -> Iterator[str]:
    """Yield each figure of a row that is not the one of the report."""
    try:
        expected = row.figures()
    except LookupError as error:
        yield f"{row.page}, {found[0]!r}: {error.args[0]}"
        return
    if len(expected) != found.re.groups:
        yield f"{row.page}, {row.text!r}: {found.re.groups} groups, {len(expected)} figures"
        return
    for text, figure in zip(found.groups(), expected, strict=True):
        if not agrees(text, figure):
            yield f"{row.page}, {found[0]!r}: says {text}, the rows {figure}"


def agrees(text: str | None, figure: float | None) -> bool:
    """Whether a figure is the one that a page has, at the digits of the page."""
    if text is None or figure is None:
        return text is None and figure is None
    shown = Decimal(text.replace(",", ""))
    half_a_digit = 0.5 * 10.0 ** int(shown.as_tuple().exponent)
    return abs(float(shown) - figure) <= half_a_digit * (1 + 1e-9)


def figures_beside_sources(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the figures that a page quotes: where they start, the figure, and the source."""
    hidden = HIDDEN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    above = None
    for start, end in passages(text):
        source = SOURCE.search(text, start, end)
        named = source[0].strip("]()") if source else None
        # The table after a sentence with a link is quoted with it.
        if text.startswith("|", start):
            named = named or above
        above = named
        if named is not None:
            yield from ((m.start(), m[0], named) for m in NUMBER.finditer(hidden, start, end))


def passages(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each sentence or table begins and ends."""
    for block in re.finditer(r"(?:[^\n]+\n?)+", text):
        start, end = block.span()
        if not text.startswith("|", start):
            for cut in SENTENCE.finditer(text, start, end):
                yield start, cut.start()
                start = cut.end()
        yield start, end
