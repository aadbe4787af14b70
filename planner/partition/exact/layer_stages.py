"""What the model asks of the decision which stage each layer is in, whatever its form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ortools.sat.python import cp_model

Expression = Any
"""A linear expression; ortools types sums as unions that cannot be added again."""
Literal = Any
"""A boolean variable or its negation."""
LayersByStage = Sequence[Sequence[int]]
"""The positions of each stage's layers."""
Values = cp_model.CpSolver | cp_model.CpSolverSolutionCallback


class LayerStages(Protocol):
    """Every layer in one stage, no edge backwards, existing stages first, none of them empty."""

    @property
    def active(self) -> Sequence[cp_model.IntVar]:
        """Whether each stage exists."""
        ...

    def done_by(self, j: int, layer: int) -> Literal:
        """Literal that the layer is in stage j or an earlier one; j may be -1 or the last."""
        ...

    def before(self, per_layer: Sequence[int], j: int) -> Expression:
        """The sum of a figure over the layers of all stages before stage j."""
        ...

    def crossing(self, per_tensor: Sequence[int], j: int) -> Expression:
        """At least the sum of a figure over the tensors that cross the cut before stage j."""
        ...

    def latest(self, layers: Sequence[int]) -> Sequence[int]:
        """Those of some layers, ascending, one of which is in the latest stage of them all."""
        ...

    def differences(self, stages: LayersByStage) -> list[Literal]:
        """Literals that imply these are not the stages; one can be true whenever they are not."""
        ...

    def hints(self, stages: LayersByStage) -> Iterator[tuple[cp_model.IntVar, int]]:
        """The decisions' values for these stages."""
        ...

    def chosen(self, values: Values) -> list[tuple[int, ...]]:
        """The layers of each stage of a solution."""
        ...
