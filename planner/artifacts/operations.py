"""The grammar of operations: ``2F0`` is stage 2, forward, microbatch 0.

``F`` forward, ``B`` whole backward, ``I`` input gradient and ``W`` weight gradient (the two halves
of ``B``). The same grammar as torch.distributed.pipelining's schedule files.
"""

import re
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


def parse_operation(word: str) -> Operation | None:
    """The operation that a word such as ``2F0`` stands for; None if it stands for none."""
    match = _PATTERN.fullmatch(word)
    if match is None:
        return None
    stage, kind, microbatch = match.groups()
    return Operation(int(stage), cast(Kind, kind), int(microbatch))


def parse_order(text: str, field: str) -> tuple[Operation, ...]:
    """Parse a device's order such as ``"0F0 0F1 0B0 0B1"``.

    Args:
        text: operations separated by white space.
        field: where the text stands, for messages.

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
    """The inverse of :func:`parse_order`."""
    return " ".join(map(str, operations))
