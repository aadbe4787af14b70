"""The one error a user of Pipeplan sees: a list of problems, each with its place and its remedy."""

from collections.abc import Iterable


class PipeplanError(Exception):
    """Something the user gave cannot be used.

    Args:
        problems: one line a problem; each names the file or field, the value found and what to do.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        super().__init__("\n".join(self.problems))


class InfeasibleError(PipeplanError):
    """No plan exists for this problem; the message says which constraint binds."""


class DeadlockError(PipeplanError):
    """The orders of a plan wait for each other in a circle."""
