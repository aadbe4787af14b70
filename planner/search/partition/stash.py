"""What a stage keeps of a microbatch, as a function of the layers it recomputes.

The exact figure is planner.costs.placement's. Here it is taken apart for solvers: a part that no
choice changes, a saving of each recomputed layer, and a few tensors whose keeping depends on
several layers at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.costs.stage_bytes import workspace_bytes
from planner.model.layer_graph import LayerGraph

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class StashedTensor:
    """A boundary tensor by positions: who makes it, who uses it, who keeps it (-1: nobody)."""

    producer: int
    users: tuple[int, ...]
    saver: int
    bytes: int

    @property
    def restarts(self) -> int | None:
        """The layer that would start again from it and alone decides whether it is kept."""
        if self.saver in self.users:
            return self.saver
        return self.users[0] if self.saver < 0 and len(self.users) == 1 else None


@dataclass(frozen=True)
class JointTensor:
    """Bytes kept if any of ``users`` is recomputed, and ``saver`` too where there is one."""

    users: frozenset[int]
    saver: int | None
    bytes: int

    def is_kept(self, recompute: Collection[int]) -> bool:
        """Return whether recomputing these layers keeps the tensor on its own account."""
        if self.saver is not None and self.saver not in recompute:
            return False
        return not self.users.isdisjoint(recompute)


@dataclass(frozen=True)
class StageStash:
    """The stash of the layers ``begin`` to ``end`` (exclusive), for one microbatch.

    ``fixed_bytes - sum of saving_bytes over recomputed layers + joint tensors kept`` is exact.

    Attributes:
        begin: position of the first layer.
        fixed_bytes: kept if nothing is recomputed.
        saving_bytes: by layer from ``begin`` on; negative where recomputing keeps more.
        joint: tensors that several layers decide on.
    """

    begin: int
    fixed_bytes: int
    saving_bytes: tuple[int, ...]
    joint: tuple[JointTensor, ...]

    def bytes(self, recompute: Collection[int]) -> int:
        """Return the stash if these layers (by position) are recomputed."""
        saved = sum(self.saving_bytes[layer - self.begin] for layer in recompute)
        kept = sum(tensor.bytes for tensor in self.joint if tensor.is_kept(recompute))
        return self.fixed_bytes - saved + kept


class StashModel:
    """Stashes of all intervals of a layer graph's layers, in executable order."""

    def __init__(self, graph: LayerGraph) -> None:
        position = {name: index for index, name in enumerate(graph.layers)}
        self._layers = [layer.stash_bytes for layer in graph.record.layers]
        self._peaks = list(graph.peak_bytes.values())
        self._inputs = list(graph.saved_input_bytes.values())
        self._tensors = tuple(
            StashedTensor(
                position[tensor.producer],
                tuple(sorted(position[user] for user in tensor.users)),
                -1 if tensor.saved_by is None else position[tensor.saved_by],
                tensor.bytes,
            )
            for tensor in graph.record.boundaries
            if tensor.bytes
        )
        self._stages: dict[tuple[int, int], StageStash] = {}

    def stage(self, begin: int, end: int) -> StageStash:
        """Return the stash of one interval."""
        key = (begin, end)
        if key not in self._stages:
            self._stages[key] = self._make(begin, end)
        return self._stages[key]

    def workspace_bytes(self, begin: int, end: int, recompute: Collection[int] = ()) -> int:
        """Return what the layers of an interval hold besides whole stashes while they run.

        Args:
            begin: position of the first layer.
            end: of the last one, exclusive.
            recompute: positions of those that run again.
        """
        return workspace_bytes(
            (self._peaks[k], self._inputs[k] if k in recompute else self._layers[k])
            for k in range(begin, end)
        )

    def _make(self, begin: int, end: int) -> StageStash:
        saving = self._layers[begin:end]
        fixed = sum(saving)
        joint: dict[tuple[frozenset[int], int | None], int] = {}
        for tensor in self._tensors:
            saver = tensor.saver if begin <= tensor.saver < end else None
            if tensor.producer < begin <= tensor.users[-1]:
                # Received: kept by its saver, by the saver's recomputation, or for others.
                if saver is None:
                    fixed += tensor.bytes
                else:
                    saving[saver - begin] -= tensor.bytes
            elif begin <= tensor.producer < end:
                users = frozenset(user for user in tensor.users if user < end)
                only = saver if saver in users else min(users, default=None)
                if saver in users or (saver is None and len(users) == 1):
                    assert only is not None
                    saving[only - begin] -= tensor.bytes
                elif users:
                    key = (users, saver)
                    joint[key] = joint.get(key, 0) + tensor.bytes
        rows = tuple(JointTensor(*key, bytes_) for key, bytes_ in joint.items())
        return StageStash(begin, fixed, tuple(saving), rows)

    @cached_property
    def kept_bytes(self) -> IntArray:
        """What each layer keeps at least, recomputed or not: what it would start again from.

        Sums over an interval, with ``received_bytes`` at its cut, are never more than the least
        stash of a stage.
        """
        starts = np.zeros(len(self._layers), dtype=np.int64)
        for tensor in self._tensors:
            layer = tensor.restarts
            if layer is not None:
                starts[layer] += tensor.bytes
        return np.minimum(starts, np.array(self._layers, dtype=np.int64))

    @cached_property
    def received_bytes(self) -> IntArray:
        """At each cut, what the stage after it receives and keeps whatever it recomputes.

        Only tensors that are in nobody's ``kept_bytes``.
        """
        totals = np.zeros(len(self._layers) + 1, dtype=np.int64)
        for tensor in self._tensors:
            if tensor.saver >= 0 or tensor.restarts is None:
                first = max(tensor.producer, tensor.saver) + 1
                totals[first : tensor.users[-1] + 1] += tensor.bytes
        return totals

    @cached_property
    def unsaved_bytes(self) -> IntArray:
        """At each cut, tensors in ``kept_bytes`` of a later layer that are kept in any case.

        Recomputing their user saves so much more if it is received than ``kept_bytes`` says.
        """
        totals = np.zeros(len(self._layers) + 1, dtype=np.int64)
        for tensor in self._tensors:
            if tensor.saver < 0 and tensor.restarts is not None:
                totals[tensor.producer + 1 : tensor.restarts + 1] += tensor.bytes
        return totals

    def least_by_interval(self) -> IntArray:
        """Return what layers i to j keep of a microbatch at least, whatever they recompute.

        Exact but for joint tensors, which count as kept for nothing.
        """
        length = len(self._layers)
        starts = np.zeros((length, length), dtype=np.int64)
        for tensor in self._tensors:
            layer = tensor.restarts
            if layer is not None:
                # One that nobody saves is kept in any case where it is received.
                made_inside = tensor.producer + 1 if tensor.saver < 0 else length
                starts[:made_inside, layer] += tensor.bytes
        each = np.triu(np.minimum(starts, np.array(self._layers, dtype=np.int64)))
        least = np.zeros((length + 1, length + 1), dtype=np.int64)
        least[:-1, 1:] = each.cumsum(axis=1)
        return least + self.received_by_interval()

    def saved_later_bytes(self, begin: int, middle: int, end: int) -> int:
        """Return bytes made and used from ``begin`` to ``middle`` that the layers after these save.

        Layers that start again from them need not keep them: those up to ``end`` do.
        """
        return sum(
            tensor.bytes
            for tensor in self._tensors
            if begin <= tensor.producer < middle <= tensor.saver < end and tensor.users[0] < middle
        )

    def received_by_interval(self) -> IntArray:
        """Return bytes that layers i to j receive and keep outside their layers' stashes."""
        length = len(self._layers)
        kept = np.zeros((length + 1, length + 1), dtype=np.int64)
        for tensor in self._tensors:
            kept[tensor.producer + 1 : tensor.users[-1] + 1, :] += tensor.bytes
            last = min(tensor.saver, tensor.users[-1])
            kept[tensor.producer + 1 : last + 1, tensor.saver + 1 :] -= tensor.bytes
        return kept
