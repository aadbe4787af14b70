"""The one error a user of Pipeplan sees: a list of problems, each with its place and its remedy."""

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any

MOST_PROBLEMS = 50
"""A file that is wrong everywhere is not told so a million times."""
MOST_CHARACTERS = 4000
"""Of one problem: enough to name every device of a deadlock, not to repeat a whole file."""


class PipeplanError(Exception):
    """Something the user gave cannot be used.

    Args:
        problems: one line a problem; each names the file or field, the value found and what to do.
            More than :data:`MOST_PROBLEMS` are counted, see :func:`first_problems`.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = first_problems(
            (problems,) if isinstance(problems, str) else problems
        )
        super().__init__("\n".join(self.problems))


class InfeasibleError(PipeplanError):
    """No plan exists for this problem; the message says which constraint binds."""


class DeadlockError(PipeplanError):
    """The orders of a plan wait for each other in a circle."""


def first_problems(problems: Iterable[str]) -> tuple[str, ...]:
    """The first problems, cut where they are endless, and how many more there are.

    Applied to its own result it changes nothing.
    """
    rest = iter(problems)
    first = [_cut(problem, MOST_CHARACTERS) for problem in islice(rest, MOST_PROBLEMS + 1)]
    more = sum(1 for _ in rest)
    if more:
        first[-1] = f"… and {more + 1} more"
    return tuple(first)


def shorten(value: Any, most: int = 60) -> str:
    """A value as a message shows it: Python's notation, cut to ``most`` characters."""
    try:
        return _cut(repr(value), most)
    except (ValueError, RecursionError):  # An integer of thousands of digits, a deep nest.
        return f"a very large {type(value).__name__}"


def near(name: str, known: Iterable[str]) -> str:
    """A remedy for a name that is not known: some that are like it, or the first."""
    names = list(dict.fromkeys(known))
    close = get_close_matches(name, names, 3) or names[:5]
    more = ", …" if len(close) < len(names) else ""
    return f"choose one such as {', '.join(close)}{more}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
