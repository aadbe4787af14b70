"""Operations of a layer put together into rows of equal ones."""

from collections.abc import Iterable, Iterator

from planner.artifacts.graph_record import Layer
from planner.artifacts.work import PHASES, OperationClass, Phase, Work, totals
from planner.tracing.measure import OperationCost


def work_of(costs: Iterable[OperationCost]) -> tuple[Work, ...]:
    """The layer's work: operations of equal class and size in a row, by phase, in order.

    Operations without products are one row a phase: their times add up as their traffic does.
    """
    # Equal ones by (phase, class, launches, FLOPs, bytes); the bytes of class memory add up.
    count: dict[tuple[Phase, OperationClass, int, int, int], int] = {}
    moved: dict[Phase, list[int]] = {phase: [0, 0] for phase in PHASES}
    for cost in costs:
        for row in _rows(cost):
            if row.operation_class == "memory":
                moved[row.phase][0] += row.operations
                moved[row.phase][1] += row.traffic_bytes
            else:
                key = (row.phase, row.operation_class, row.operations, row.flops, row.traffic_bytes)
                count[key] = count.get(key, 0) + 1
    rows = [
        Work(
            phase=phase,
            operation_class=kind,
            operations=number * operations,
            flops=number * flops,
            traffic_bytes=number * bytes_,
        )
        for (phase, kind, operations, flops, bytes_), number in count.items()
    ]
    rows += [_memory(phase, *moved[phase]) for phase in PHASES if moved[phase][0]]
    return tuple(sorted(rows, key=lambda row: PHASES.index(row.phase)))


def gradient_sum(bytes_: int) -> OperationCost:
    """Adding a microbatch's gradient of a parameter to those before it: two reads and a write.

    The first microbatch of an iteration has none to add to; it is not told apart.
    """
    return OperationCost(weight_gradient_traffic_bytes=3 * bytes_)


def layer_of(
    name: str,
    costs: Iterable[OperationCost],
    stash_bytes: int,
    weight_stash_bytes: int,
    parameters: tuple[str, ...],
) -> Layer:
    """A layer whose FLOPs and traffic are those of its operations.

    Args:
        name: of the layer.
        costs: of its operations.
        stash_bytes: what it keeps from forward for backward.
        weight_stash_bytes: what it keeps from the input gradient of a split backward for the
            weight gradient.
        parameters: names of those it uses.
    """
    work = work_of(costs)
    forward, input_gradient, weight_gradient = (totals(work, phase) for phase in PHASES)
    return Layer(
        name=name,
        forward_flops=forward[0],
        input_gradient_flops=input_gradient[0],
        weight_gradient_flops=weight_gradient[0],
        forward_traffic_bytes=forward[1],
        input_gradient_traffic_bytes=input_gradient[1],
        weight_gradient_traffic_bytes=weight_gradient[1],
        stash_bytes=stash_bytes,
        weight_stash_bytes=weight_stash_bytes,
        parameters=parameters,
        work=work,
    )


def _rows(cost: OperationCost) -> Iterator[Work]:
    """One operation's phases; what moves nothing is a view and no operation of the device."""
    for phase in PHASES:
        flops = getattr(cost, f"{phase}_flops")
        bytes_ = getattr(cost, f"{phase}_traffic_bytes")
        factor = cost.gradients if phase == "input_gradient" else 1
        operations = max(1, cost.launches * factor)
        if flops:
            yield Work(
                phase=phase,
                operation_class=cost.operation_class,
                operations=operations,
                flops=flops,
                traffic_bytes=bytes_,
            )
        elif bytes_:
            yield _memory(phase, operations, bytes_)


def _memory(phase: Phase, operations: int, bytes_: int) -> Work:
    return Work(
        phase=phase,
        operation_class="memory",
        operations=operations,
        flops=0,
        traffic_bytes=bytes_,
    )
