"""Reader and writer of Megatron-LM's ``--pipeline-model-parallel-layout``.

The grammar, as its documentation and its help text have it: ``|`` divides stages; ``E`` is the
embedding, ``t`` a transformer block, ``m`` a block of multi-token prediction, ``L`` the loss with
what comes before it; ``x*n`` is n times the character x, ``(…)*n`` n times what is in parentheses,
bars included; commas are for the eye. Parentheses are repeated first and do not nest, and a
character within them may have a number of its own: ``Et*3|(tt|)*29,m|L`` is a stage of the
embedding and three blocks, 29 of two, one of ``m`` and one of ``L``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from planner.errors import PipeplanError

SYMBOLS = {
    "E": "embedding",
    "t": "transformer block",
    "m": "multi-token prediction",
    "L": "head and loss",
}
MOST_SYMBOLS = 100_000
"""Most symbols of a layout with all repetitions written out; more is a typing error."""
_ATOM = re.compile(r"[EtmL|](?:\*[0-9]++)?+(?!\*)")
_PIECE = re.compile(r"(?:([EtmL|])|\(((?:[EtmL|](?:\*[0-9]++)?+)+)\)(?=\*))(?:\*([0-9]++))?+(?!\*)")
"""A symbol or parentheses, and how often they are repeated."""


def parse_layout(text: str, source: str = "layout") -> tuple[str, ...]:
    """The stages of a layout, each as its symbols: ``Et*2|(t|)*2L`` is ``Ett t t L``.

    Args:
        text: in Megatron's grammar. An empty stage is an empty string.
        source: where it stands, for messages.

    Raises:
        PipeplanError: naming the character that is wrong, its position from 1, and what to write.
    """
    plain = text.replace(",", "")
    expanded, fault = _expanded(plain, 0, len(plain))
    if fault is None:
        return tuple(expanded.split("|"))
    at = [*(at for at, character in enumerate(text) if character != ","), len(text)][fault[0]]
    character = repr(text[at]) if at < len(text) else "the end"
    raise PipeplanError(f"{source}: character {at + 1}, {character}: {fault[1]}")


def render_layout(stages: Sequence[str]) -> str:
    """The inverse of :func:`parse_layout`, with repetitions drawn together.

    Args:
        stages: of the characters of :data:`SYMBOLS` each; none may be empty of all stages.
    """
    runs = [(stage, len(list(row))) for stage, row in groupby(stages[:-1])]
    return "".join([*(_run(stage, count) for stage, count in runs), _stage(stages[-1])])


def _run(stage: str, count: int) -> str:
    """A stage so many times, each with its bar."""
    one = f"{_stage(stage)}|"
    return one * count if count < 3 else f"({one})*{count},"


def _stage(symbols: str) -> str:
    runs = ((symbol, len(list(row))) for symbol, row in groupby(symbols))
    return "".join(s * n if n < 3 else f"{s}*{n}" for s, n in runs)


_Fault = tuple[int, str]
"""The character that is wrong, counted without commas, and what to do."""


def _expanded(plain: str, at: int, end: int) -> tuple[str, _Fault | None]:
    """Return symbols and bars with repetitions written out, up to the first fault."""
    found = ""
    while at < end:
        piece = _PIECE.match(plain, at, end)
        if piece is None:
            return found, _fault(plain, at)
        one, fault = (piece[1], None) if piece[1] else _expanded(plain, *piece.span(2))
        at = piece.end()
        # Seven digits are more than the most.
        times = int((piece[3] or "1").lstrip("0")[:7] or 0)
        if fault is None and len(found) + len(one) * times > MOST_SYMBOLS:
            fault = at - 1, f"more than {MOST_SYMBOLS:,} layers and bars; correct a number"
        if fault is not None:
            return found, fault
        found += one * times
    return found, None


def _fault(plain: str, at: int) -> _Fault:
    """Return what is wrong where no piece begins, or none ends."""
    symbol = plain[at]
    if symbol == "(":
        return _fault_of_group(plain, at)
    if symbol not in SYMBOLS and symbol != "|":
        return at, _why_no_symbol(symbol)
    return _fault_of_times(plain, at + 1)


def _fault_of_group(plain: str, opened: int) -> _Fault:
    at = opened + 1
    while at < len(plain) and plain[at] not in "()":
        atom = _ATOM.match(plain, at)
        if atom is None:
            return _fault(plain, at)
        at = atom.end()
    if at == len(plain):
        return opened, "no ')' closes this parenthesis; add it, followed by *n"
    if plain[at] == "(":
        return at, "parentheses do not nest; write the inner repetition out"
    if at == opened + 1:
        return opened, "nothing is in these parentheses; remove them"
    if plain[at + 1 : at + 2] != "*":
        return at + 1, "expected *n after ')', such as (tt|)*4; add it"
    return _fault_of_times(plain, at + 1)


def _fault_of_times(plain: str, star: int) -> _Fault:
    digits = re.compile("[0-9]*").match(plain, star + 1)
    assert digits is not None  # It may be empty.
    if not digits[0]:
        return digits.end(), "expected a number after '*', such as t*3"
    return digits.end(), "a repetition is not repeated again; write one number"


def _why_no_symbol(character: str) -> str:
    if character == ")":
        return "no '(' opens this parenthesis; remove it or add '('"
    if character == "*":
        return "there is nothing before '*' to repeat; write x*n, such as t*3"
    if character in "'\"":
        return "quotes belong to the shell and are no part of a layout; remove them"
    if character.isspace():
        return "layouts have no white space; remove it, or use a comma"
    if character in "0123456789":
        return "a number follows '*' only, such as t*3"
    known = ", ".join(f"{symbol} ({meaning})" for symbol, meaning in SYMBOLS.items())
    other = character.swapcase()
    hint = f" (upper and lower case differ: {other})" if other in SYMBOLS else ""
    return f"expected one of {known} or |{hint}"
