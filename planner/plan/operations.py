"""The grammar of operations: ``2F0`` is stage 2, forward, microbatch 0.

``F`` is a forward, ``B`` a whole backward, ``I`` and ``W`` the input and weight gradient of a split
backward. Schedule files of torch.distributed.pipelining use the same grammar.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, cast

from planner.errors import PipeplanError, shorten

Kind = Literal["F", "B", "I", "W"]
KIND_LABELS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}
_PATTERN = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,7})")


class Operation(NamedTuple):
    """One computation of one stage on one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Orders = Mapping[str, Sequence[Operation]]
"""The operations of each device in order, by its name."""


def owners(orders: Orders) -> dict[tuple[int, int], str]:
    """Return the device that runs each (stage, microbatch)."""
    return {(op.stage, op.microbatch): device for device, order in orders.items() for op in order}


def numbered_by_losses(orders: Orders, last: int) -> Orders:
    """Return orders in which each device runs the forwards of the last stage in ascending order.

    Microbatches are alike; they exchange their numbers within the devices that they visit.

    Args:
        orders: by device.
        last: the last stage.
    """
    number: dict[int, int] = {}
    for order in orders.values():
        held = [row.microbatch for row in order if row.stage == last and row.kind == "F"]
        number.update(zip(held, sorted(held), strict=True))
    return {
        device: tuple(row._replace(microbatch=number[row.microbatch]) for row in order)
        for device, order in orders.items()
    }


def one_forward_one_backward(
    rank: int, ranks: int, stages: int, microbatches: Sequence[int]
) -> list[Operation] | None:
    """Return the order of 1F1B of a rank, interleaved 1F1B where it holds several stages.

    Stage s is on rank s mod D. Narayanan et al. 2021, "Efficient large-scale language model
    training on GPU clusters", section 2.2.

    Args:
        rank: the position of the device in the pipeline.
        ranks: D, the devices of the pipeline.
        stages: of the pipeline.
        microbatches: that the pipeline runs, in order.

    Returns:
        None where it is not defined: stages that are no multiple of the ranks, or several stages a
        rank and microbatches that are no multiple of them.
    """
    if stages % ranks or (stages > ranks and len(microbatches) % ranks):
        return None
    held = range(rank, stages, ranks)
    size = ranks if stages > ranks else max(1, len(microbatches))
    rounds = [microbatches[i : i + size] for i in range(0, len(microbatches), size)]
    ahead = ranks - 1 - rank
    if stages > ranks:
        ahead += (len(held) - 1) * ranks + ahead
    return in_turn(held, rounds, ahead)


def in_turn(stages: Sequence[int], rounds: Sequence[Sequence[int]], ahead: int) -> list[Operation]:
    """Return so many forwards, then a forward and a whole backward in turn, then the rest.

    Args:
        stages: of one device.
        rounds: microbatches that pass one stage before they pass the next.
        ahead: number of forwards before the first backward's.
    """
    forward = [Operation(s, "F", m) for row in rounds for s in stages for m in row]
    backward = [Operation(s, "B", m) for row in rounds for s in reversed(stages) for m in row]
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for done, operation in enumerate(forward[ahead:]):
        order += [operation, backward[done]]
    return order + backward[len(forward) - ahead :]


def parse_operation(word: str) -> Operation | None:
    """Parse an operation such as ``2F0``; return None if the word is not one."""
    match = _PATTERN.fullmatch(word)
    if match is None:
        return None
    stage, kind, microbatch = match.groups()
    return Operation(int(stage), cast(Kind, kind), int(microbatch))


def parse_order(text: str, field: str) -> tuple[Operation, ...]:
    """Parse a device's order such as ``"0F0 0F1 0B0 0B1"``.

    Args:
        text: operations separated by white space.
        field: name of the field, for messages.

    Raises:
        PipeplanError: naming each word that is not an operation.
    """
    operations, problems = [], []
    for position, word in enumerate(text.split()):
        operation = parse_operation(word)
        if operation is None:
            problems.append(
                f"{field}: word {position + 1} is {shorten(word)}, expected an operation such as "
                "'2F0' (stage, one of F B I W, microbatch)"
            )
            continue
        operations.append(operation)
    if problems:
        raise PipeplanError(problems)
    return tuple(operations)


def format_order(operations: tuple[Operation, ...] | list[Operation]) -> str:
    """Format an order; the inverse of :func:`parse_order`."""
    return " ".join(map(str, operations))


# A number with a leading zero is not extended to a range: gpu08-9 would not say what it means.
_NUMBERED = re.compile(r"(.*?)(?<!\d)(0|[1-9]\d*)")


def compress_devices(names: Iterable[str]) -> str:
    """Format device names with runs of consecutive numbers joined.

    ``n0/gpu0 n0/gpu1 n0/gpu2 ws1`` becomes ``n0/gpu0-2, ws1``; the order stays.
    """
    runs: list[tuple[str, int | None, int]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, number = (match[1], int(match[2])) if match else (name, None)
        if runs and number is not None:
            last, first, length = runs[-1]
            if first is not None and last == prefix and number == first + length:
                runs[-1] = (last, first, length + 1)
                continue
        runs.append((prefix, number, 1))
    return ", ".join(_run_name(*run) for run in runs)


def _run_name(prefix: str, first: int | None, length: int) -> str:
    if first is None:
        return prefix
    return f"{prefix}{first}" + (f"-{first + length - 1}" if length > 1 else "")


def stages_label(stages: Sequence[int]) -> str:
    """Format stage indices for a row's label, such as ``stage 3`` or ``stages 0, 4``."""
    return f"stage{'s' if len(stages) > 1 else ''} {compress_devices(map(str, stages))}"
