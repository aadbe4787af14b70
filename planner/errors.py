"""The errors that users see: a list of problems, each with its place and a remedy."""

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from io import TextIOWrapper
from itertools import islice
from typing import Any

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as a shell has it."""
MOST_PROBLEMS = 50
"""Most problems reported at once, for files that are wrong everywhere."""
MOST_CHARACTERS = 4000
"""Most characters of one problem: enough to name every device of a deadlock, not a whole file."""


class PipeplanError(Exception):
    """An input of the user that cannot be used.

    Args:
        problems: one line per problem; each names the file or field, the value found and what to
            do. Problems beyond :data:`MOST_PROBLEMS` are counted, see :func:`first_problems`.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = first_problems(
            (problems,) if isinstance(problems, str) else problems
        )
        super().__init__("\n".join(self.problems))


class InfeasibleError(PipeplanError):
    """No plan exists for this problem; the message says which constraint binds.

    Args:
        problems: see :class:`PipeplanError`.
        is_proved: whether there is none; otherwise none was found.
    """

    def __init__(self, problems: str | Iterable[str], *, is_proved: bool = False) -> None:
        super().__init__(problems)
        self.is_proved = is_proved


class DeadlockError(PipeplanError):
    """The orders of a plan wait for each other in a cycle."""


def first_problems(problems: Iterable[str]) -> tuple[str, ...]:
    """Return the first problems, each cut to a maximum length, and a count of the others.

    Applied to its own result it changes nothing.
    """
    rest = iter(problems)
    first = [_cut(problem, MOST_CHARACTERS) for problem in islice(rest, MOST_PROBLEMS + 1)]
    more = sum(1 for _ in rest)
    if more:
        first[-1] = f"… and {more + 1} more"
    return tuple(first)


def shorten(value: Any, most: int = 60) -> str:
    """Format a value for a message: Python's notation, cut to ``most`` characters."""
    try:
        return _cut(repr(value), most)
    except (ValueError, RecursionError):  # An integer of thousands of digits, a deep nest.
        return f"a very large {type(value).__name__}"


def require_kind(value: Any, kind: type | tuple[type, ...], name: str, remedy: str) -> None:
    """Raise a PipeplanError that names the argument and the remedy if it has another type."""
    if not isinstance(value, kind):
        wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        found = f"{shorten(value)} of type {type(value).__name__}"
        raise PipeplanError(f"{name}: expected {wanted}, not {found}; {remedy}")


def printable(text: str) -> str:
    """Return a text for a terminal: names from files are shown, and cannot command it.

    Characters that do not print are written as in Python's notation, but for line breaks and tabs.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def print_in_any_encoding() -> None:
    """Have stdout and stderr write characters that their encoding lacks as in Python's notation."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def near(name: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown name: known names that are similar, or the first ones."""
    names = list(dict.fromkeys(known))
    close = get_close_matches(name, names, 3) or names[:5]
    more = ", …" if len(close) < len(names) else ""
    return f"choose one such as {', '.join(close)}{more}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
