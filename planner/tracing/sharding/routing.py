"""How tokens are routed to experts, and whether a step's experts can be given out whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from planner.errors import PipeplanError
from planner.job import Job
from planner.model.split_record import most_loaded
from planner.tracing.export import ExportedStep
from planner.tracing.layers import LayerAssignment
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions

_INSTEAD = "leave expert_parallel out"


@dataclass(frozen=True)
class ExpertRouting:
    """How many tokens the experts of layers get.

    Attributes:
        loads: relative numbers, one for each expert: of all layers with experts, or of each; empty:
            equally many.
    """

    loads: tuple[tuple[float, ...], ...] = ()

    def most_loaded(self, layer: int, degree: int) -> Fraction:
        """Return :func:`planner.model.split_record.most_loaded` of a layer with experts."""
        return most_loaded(self._of(layer), degree) if self.loads else Fraction(1)

    def _of(self, layer: int) -> tuple[float, ...]:
        return self.loads[layer if len(self.loads) > 1 else 0]

    def require_whole(
        self, classes: Sequence[DimensionClass], layers: LayerAssignment, degree: int
    ) -> None:
        """Refuse to give out experts that are not there, or not over so many members.

        Raises:
            PipeplanError: naming the layers.
        """
        experts = [row for row in classes if row.experts]
        if not experts:
            raise PipeplanError(
                "expert_parallel = true: the model sends no tokens to experts by the operations of "
                "planner.tracing.expert_operations (docs/experts.md), so that there are no whole "
                f"experts to give out; use these operations, or {_INSTEAD}"
            )
        problems = []
        differs = len(self.loads) not in (0, 1, len(experts))
        if differs:
            problems.append(
                f"expert_load: has lists for {len(self.loads)} layers, but {len(experts)} have "
                "experts; give a list for each, or one for all"
            )
        for place, row in enumerate(experts):
            layer = next(layers.layer_of[n] for n, _ in row.parts if n in layers.layer_of)
            given = len(self._of(place)) if self.loads and not differs else row.experts
            problems += _problems(layer, row, degree, given)
        if problems:
            raise PipeplanError(dict.fromkeys(problems))


def _problems(layer: str, row: DimensionClass, degree: int, given: int) -> Iterator[str]:
    """Yield why a layer's experts cannot be given out; ``given`` is how many have a load."""
    if given != row.experts:
        yield (
            f"expert_load: has {given} numbers, but layer {layer!r} has {row.experts} experts; "
            "give one for each"
        )
    if row.obstacles:
        yield (
            f"expert_parallel = true: the experts of layer {layer!r} cannot be given out "
            f"whole: {row.obstacles[0]}; {_INSTEAD}"
        )
    if row.experts % degree:
        yield (
            f"tensor_parallel = {degree}: does not divide the {row.experts} experts of "
            f"layer {layer!r}; choose a divisor of them, or {_INSTEAD}"
        )


def routing_of(job: Job) -> ExpertRouting | None:
    """Return the routing for which a job divides experts; None if it gives out no whole ones."""
    return ExpertRouting(job.expert_loads) if job.expert_parallel else None


def degrees_with_experts(exported: ExportedStep, degrees: Sequence[int]) -> tuple[int, ...]:
    """Return the degrees that divide the experts of every layer.

    Raises:
        PipeplanError: if there are none.
    """
    counts = sorted({row.experts for row in Dimensions(exported).classes} - {0})
    found = tuple(degree for degree in degrees if all(count % degree == 0 for count in counts))
    if degrees and not found:
        raise PipeplanError(
            f'tensor_parallel = "any": none of {", ".join(map(str, degrees))} divides the '
            f"{' and '.join(map(str, counts))} experts of a layer; choose another number of "
            f"experts, or {_INSTEAD}"
        )
    return found
