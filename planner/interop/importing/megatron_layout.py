"""Reader and writer of Megatron-LM's ``--pipeline-model-parallel-layout``.

The grammar, as its documentation and its help text have it: ``|`` divides stages; ``E`` is the
embedding, ``t`` a transformer block, ``m`` a block of multi-token prediction, ``L`` the loss with
what comes before it; ``x*n`` is n times the character x, ``(…)*n`` n times what is in parentheses,
bars included; commas are for the eye. Parentheses are repeated first and do not nest, and a
character within them may have a number of its own: ``Et*3|(tt|)*29,m|L`` is a stage of the
embedding and three blocks, 29 of two, one of ``m`` and one of ``L``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
DIGITS = "0123456789"


def parse_layout(text: str, source: str = "layout") -> tuple[str, ...]:
    """The stages of a layout, each as its symbols: ``Et*2|(t|)*2L`` is ``Ett t t L``.

    Args:
        text: in Megatron's grammar. An empty stage is an empty string.
        source: where it stands, for messages.

    Raises:
        PipeplanError: naming the character that is wrong, its position from 1, and what to write.
    """
    return tuple(_Reader(text, source).expanded().split("|"))


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


@dataclass
class _Reader:
    """Reads a layout from left to right; commas count for positions and nothing else."""

    text: str
    source: str
    at: int = 0

    def expanded(self) -> str:
        """All symbols and bars, repetitions written out."""
        found: list[str] = []
        length = 0
        for piece in self._pieces():
            found.append(piece)
            length += len(piece)
            if length > MOST_SYMBOLS:
                raise self._wrong(f"more than {MOST_SYMBOLS:,} layers and bars; correct a number")
        return "".join(found)

    def _pieces(self) -> Iterator[str]:
        while self._peek():
            yield self._group() if self._peek() == "(" else self._atom()

    def _atom(self) -> str:
        """A character, or ``x*n``."""
        character = self._peek()
        if character not in SYMBOLS and character != "|":
            raise self._wrong(self._why_no_symbol(character))
        self.at += 1
        return character * self._times(1)

    def _group(self) -> str:
        """``(…)*n``."""
        opened = self.at
        self.at += 1
        inside: list[str] = []
        while self._peek() not in (")", ""):
            if self._peek() == "(":
                raise self._wrong("parentheses do not nest; write the inner repetition out")
            inside.append(self._atom())
        if not self._peek():
            raise self._wrong("no ')' closes this parenthesis; add it, followed by *n", opened)
        if not inside:
            raise self._wrong("nothing is in these parentheses; remove them", opened)
        self.at += 1
        times = self._times(0)
        return self._repeated("".join(inside), times)

    def _times(self, default: int) -> int:
        """The number of a repetition; ``default`` if there is none, 0 where it must be there."""
        if self._peek() != "*":
            if default:
                return default
            raise self._wrong("expected *n after ')', such as (tt|)*4; add it")
        self.at += 1
        digits = ""
        while self._peek() and self._peek() in DIGITS:
            digits += self._peek()
            self.at += 1
        if not digits:
            raise self._wrong("expected a number after '*', such as t*3")
        if self._peek() == "*":
            raise self._wrong("a repetition is not repeated again; write one number")
        if len(digits.lstrip("0")) > len(str(MOST_SYMBOLS)):
            raise self._wrong(f"{digits[:12]} is too large a number; correct it", self.at - 1)
        return int(digits)

    def _repeated(self, inside: str, times: int) -> str:
        if len(inside) * times > MOST_SYMBOLS:
            raise self._wrong(
                f"more than {MOST_SYMBOLS:,} layers and bars; correct a number", self.at - 1
            )
        return inside * times

    def _peek(self) -> str:
        """The next character that is no comma; empty at the end."""
        while self.text[self.at : self.at + 1] == ",":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _why_no_symbol(self, character: str) -> str:
        if character == ")":
            return "no '(' opens this parenthesis; remove it or add '('"
        if character == "*":
            return "there is nothing before '*' to repeat; write x*n, such as t*3"
        if character in "'\"":
            return "quotes belong to the shell and are no part of a layout; remove them"
        if character.isspace():
            return "layouts have no white space; remove it, or use a comma"
        if character in DIGITS:
            return "a number follows '*' only, such as t*3"
        known = ", ".join(f"{symbol} ({meaning})" for symbol, meaning in SYMBOLS.items())
        other = character.swapcase()
        hint = f" (upper and lower case differ: {other})" if other in SYMBOLS else ""
        return f"expected one of {known} or |{hint}"

    def _wrong(self, problem: str, at: int | None = None) -> PipeplanError:
        at = self.at if at is None else at
        character = repr(self.text[at]) if at < len(self.text) else "the end"
        return PipeplanError(f"{self.source}: character {at + 1}, {character}: {problem}")
