"""Gradient synchronisation among the ranks that hold the same parameters."""

from typing import Protocol

from executor.sync.all_reduce import AllReduce
from executor.sync.groups import ParameterGroup


class Synchronisation(Protocol):
    """A strategy: called once an iteration, after this rank's last backward."""

    def reduce(self) -> None:
        """Make the gradients of shared parameters agree among the ranks that hold them."""


STRATEGIES = {"all_reduce": AllReduce}

__all__ = ["STRATEGIES", "AllReduce", "ParameterGroup", "Synchronisation"]
