"""Messages between tensor-parallel groups of several sizes: who sends which part of what.

A tensor between stages is whole on every member of a group, or each member has an equal share of
its positions, in order. Members of a group of another size need it whole or in other shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from executor.runtime.worker import TensorSpec
from executor.split.stage_module import BoundaryTensor
from planner.plan.operations import Operation
from planner.plan.plan import Plan, RankPlace
from planner.plan.programs import whole_sender


class TensorPart(NamedTuple):
    """A part of a tensor of a message, in the places of the whole tensor.

    Attributes:
        tensor: its number in the message.
        dimension: that is divided.
        begin, end: of the part; None of a tensor that is sent whole.
    """

    tensor: int
    dimension: int
    begin: int
    end: int | None


@dataclass(frozen=True)
class Shared:
    """The dimensions of which members have shares, for each tensor of a message; None: whole.

    Attributes:
        ours: in this rank's group.
        theirs: in the other group.
    """

    ours: tuple[int | None, ...]
    theirs: tuple[int | None, ...]


class MemberMessages:
    """Divides what a rank sends to members of other groups, and joins what it receives.

    Args:
        own: place of this rank.
        places: of all ranks.
        shared: of the messages that this rank sends or receives, by what made them.
    """

    def __init__(
        self,
        own: RankPlace,
        places: Sequence[RankPlace],
        shared: Mapping[tuple[int, str], Shared],
    ) -> None:
        self._own, self._places, self._shared = own, places, shared

    @classmethod
    def of_plan(
        cls, plan: Plan, rank: int, sent: Mapping[int, Sequence[Sequence[BoundaryTensor]]]
    ) -> MemberMessages:
        """Find what a rank's messages have shares of.

        Args:
            plan: whose groups have several sizes.
            rank: whose messages.
            sent: what stages send, by the members of the group that holds them.
        """
        own, shared = plan.place_of(rank), {}
        members = [len(plan.members(stage.devices[0])) for stage in plan.stages]
        for index in range(len(plan.stages) - 1):
            near, far = (sent[members[number]][index] for number in (index, index + 1))
            # Activations are sent in the order of memory, gradients as they are.
            there = [tuple(map(_sent_dimension, row)) for row in (near, far)]
            back = [tuple(t.shared for t in row if t.requires_grad) for row in (near, far)]
            for side, stage in enumerate(plan.stages[index : index + 2]):
                if own.replica in stage.devices:
                    shared[index, "F"] = Shared(there[side], there[1 - side])
                    shared[index + 1, "B"] = Shared(back[side], back[1 - side])
        return cls(own, [plan.place_of(other) for other in range(plan.world_size)], shared)

    def sent(self, made: Operation, tensors: Sequence[Tensor], peer: int) -> list[Tensor]:
        """Return the parts of tensors that a rank is to have from this one."""
        shared, target = self._shared[made.stage, made.kind], self._places[peer]
        found = []
        for part in self._parts(
            [tuple(tensor.shape) for tensor in tensors],
            (shared.ours, shared.theirs),
            self._own,
            (self._own, target),
        ):
            tensor = tensors[part.tensor]
            if part.end is not None:
                first = _first(shared.ours[part.tensor], tensor.shape, self._own)
                length = part.end - part.begin
                tensor = tensor.narrow(part.dimension, part.begin - first, length).contiguous()
            found.append(tensor)
        return found

    def expected(
        self, made: Operation, specs: Sequence[TensorSpec], peer: int
    ) -> list[tuple[TensorPart, TensorSpec]]:
        """Return the parts of tensors that a rank sends to this one, with their shapes.

        Args:
            made: what made the tensors.
            specs: of the tensors as this rank needs them.
            peer: the rank that sends.
        """
        shared, source = self._shared[made.stage, made.kind], self._places[peer]
        rows = self._parts(
            [spec.shape for spec in specs],
            (shared.theirs, shared.ours),
            self._own,
            (source, self._own),
        )
        return [(part, _spec_of(specs[part.tensor], part)) for part in rows]

    def _parts(
        self,
        shapes: Sequence[tuple[int, ...]],
        shared: tuple[Sequence[int | None], Sequence[int | None]],
        own: RankPlace,
        ends: tuple[RankPlace, RankPlace],
    ) -> list[TensorPart]:
        """Return the parts of a message.

        Args:
            shapes: of its tensors as this rank has or needs them.
            shared: dimensions, at the source and at the target.
            own: place of this rank, which is one of the ends.
            ends: source and target.
        """
        source, target = ends
        is_sender = whole_sender(source.members, target.member, target.members) == source.member
        found = []
        for number, shape in enumerate(shapes):
            # A random state comes last; every member has the same.
            here, there = (row[number] if number < len(row) else None for row in shared)
            dimension = here if here is not None else there
            if dimension is None:
                found += [TensorPart(number, 0, 0, None)] if is_sender else []
                continue
            mine = (here if own is source else there) is not None
            size = shape[dimension] * (own.members if mine else 1)
            held = _range(source, size) if here is not None else (0, size)
            needed = _range(target, size) if there is not None else (0, size)
            begin, end = max(held[0], needed[0]), min(held[1], needed[1])
            if begin < end and (here is not None or is_sender):
                found.append(TensorPart(number, dimension, begin, end))
        return found


def joined(parts: Iterable[tuple[TensorPart, Tensor]]) -> tuple[Tensor, ...]:
    """Return the tensors of a message whose parts came from several ranks."""
    found: dict[int, list[tuple[TensorPart, Tensor]]] = {}
    for part, tensor in parts:
        found.setdefault(part.tensor, []).append((part, tensor))
    made = []
    for number in sorted(found):
        rows = sorted(found[number], key=lambda row: row[0].begin)
        pieces = [tensor for _, tensor in rows]
        made.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, rows[0][0].dimension))
    return tuple(made)


def _sent_dimension(tensor: BoundaryTensor) -> int | None:
    """Return where the dimension that members share is in what is sent."""
    return None if tensor.shared is None else tensor.order.index(tensor.shared)


def _range(place: RankPlace, size: int) -> tuple[int, int]:
    """Return where a member's share of a dimension begins and ends."""
    each = size // place.members
    return place.member * each, (place.member + 1) * each


def _first(shared: int | None, shape: Sequence[int], place: RankPlace) -> int:
    """Return where what a member has of a tensor begins."""
    return 0 if shared is None else place.member * shape[shared]


def _spec_of(spec: TensorSpec, part: TensorPart) -> TensorSpec:
    if part.end is None:
        return spec
    shape = list(spec.shape)
    shape[part.dimension] = part.end - part.begin
    return replace(spec, shape=tuple(shape))
