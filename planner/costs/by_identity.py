"""Results of a function that are kept by the identity of its argument."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class _Same:
    """An object that equals itself alone."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held


def by_identity(function: F) -> F:
    """Keep the results of the latest calls, for arguments that are slow to compare but immutable.

    Args:
        function: of one such argument, such as a problem, and others that can be hashed.
    """

    @lru_cache(maxsize=8)
    def known(first: _Same, *rest: Hashable) -> Any:
        return function(first.held, *rest)

    @wraps(function)
    def call(first: object, *rest: Hashable) -> Any:
        return known(_Same(first), *rest)

    return call  # type: ignore[return-value]
