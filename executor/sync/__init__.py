"""Gradient synchronisation among the ranks that hold the same parameters."""

from typing import Protocol

from executor.lower import Reduce
from executor.sync.all_reduce import AllReduce


class Synchronisation(Protocol):
    """A strategy of making gradients agree among the ranks that hold the same parameters."""

    def start(self, reduce: Reduce) -> None:
        """This rank's last backward that adds to these gradients is done."""

    def finish(self) -> None:
        """The gradients of all shared parameters agree after it."""


STRATEGIES = {"all_reduce": AllReduce}

__all__ = ["STRATEGIES", "AllReduce", "Synchronisation"]
