"""Whether a step's experts can be given out whole, and how many tokens each gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.errors import PipeplanError
from planner.job import Job
from planner.tracing.export import ExportedStep
from planner.tracing.layers import LayerAssignment
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions

Loads = tuple[tuple[float, ...], ...]
"""Relative numbers of tokens of a layer's experts: of all layers with experts, or of each in turn;
empty: equally many."""
_INSTEAD = "leave expert_parallel out"


def routing_of(job: Job) -> Loads | None:
    """Return the loads for which a job divides experts; None if it gives out no whole ones."""
    return job.expert_loads if job.expert_parallel else None


def load_of(loads: Loads, place: int) -> tuple[float, ...]:
    """Return the load of a layer by its place among those with experts."""
    return loads[place if len(loads) > 1 else 0] if loads else ()


def require_whole_experts(
    classes: Sequence[DimensionClass], layers: LayerAssignment, degree: int, loads: Loads
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
    if len(loads) not in (0, 1, len(experts)):
        raise PipeplanError(
            f"expert_load: has lists for {len(loads)} layers, but {len(experts)} have experts; "
            "give a list for each, or one for all"
        )
    problems: list[str] = []
    for place, row in enumerate(experts):
        layer = next(layers.layer_of[n] for n, _ in row.parts if n in layers.layer_of)
        problems += _problems(layer, row, degree, len(load_of(loads, place)) or row.experts)
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
