"""What training has on each device: parameters and their optimizer state, by stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.artifacts.layer_graph import LayerGraph
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.partition.chain import Chain, IntArray, Partition

BoolArray = NDArray[np.bool_]
MOST_BYTES = 2**62
"""Of all state: sums over devices are taken apart, so each fits 64 bits."""


class State:
    """Parameters with their optimizer state, and which devices hold which of them.

    A parameter's state is its weights and, if it is trained, the optimizer's moments with the
    float32 master of a low-precision weight; gradients begin anew in each iteration.

    Args:
        plan: that training ran by.
        survivors: its devices that are still there.

    Attributes:
        names: FQNs of the parameters.
        bytes: of each parameter's state.
        holders: by surviving device in use, which parameters it holds.
    """

    def __init__(self, plan: Plan, survivors: Collection[str]) -> None:
        graph = LayerGraph.from_record(plan.model.graph)
        per_element = plan.job.optimizer_bytes_per_element
        rows = list(graph.parameters.values())
        self._graph = graph
        self.names = tuple(parameter.name for parameter in rows)
        self._place = {name: place for place, name in enumerate(self.names)}
        sizes = [p.bytes + (per_element * p.elements if p.trainable else 0) for p in rows]
        if sum(sizes) >= MOST_BYTES:
            raise PipeplanError(
                f"model.graph.parameters: their state is {sum(sizes)} bytes, and more than "
                f"{MOST_BYTES} cannot be; correct their bytes and elements"
            )
        self.bytes: IntArray = np.array(sizes, dtype=np.int64)
        self.holders: dict[str, BoolArray] = {}
        for stage in plan.stages:
            held = self.of_layers(stage.layers)
            for device in set(stage.devices).intersection(survivors):
                self.holders[device] = self.held(device) | held

    def of_layers(self, layers: Iterable[str]) -> BoolArray:
        """Which parameters some layers use."""
        used = np.zeros(len(self.names), dtype=bool)
        used[[self._place[p.name] for p in self._graph.parameters_of(list(layers))]] = True
        return used

    def held(self, device: str) -> BoolArray:
        """Which parameters a device holds: none if it is new."""
        found = self.holders.get(device)
        return np.zeros(len(self.names), dtype=bool) if found is None else found

    def size(self, parameters: BoolArray) -> int:
        """Bytes of the state of some parameters."""
        return int(self.bytes[parameters].sum())

    def missing_bytes(self, contents: Sequence[BoolArray], devices: Sequence[str]) -> IntArray:
        """What each content lacks on each device: a row a content, a column a device."""
        if not contents or not devices:
            return np.zeros((len(contents), len(devices)), dtype=np.int64)
        wanted = np.array(contents) * self.bytes
        lacking = ~np.array([self.held(device) for device in devices])
        return np.asarray(wanted @ lacking.T.astype(np.int64))

    def lacking_bytes(self, wanted: Mapping[str, BoolArray]) -> int:
        """Bytes that devices do not hold yet of what each needs."""
        return sum(self.size(needed & ~self.held(device)) for device, needed in wanted.items())

    def wanted(self, chain: Chain, partition: Partition) -> dict[str, BoolArray]:
        """Which parameters each device of a partition needs."""
        found: dict[str, BoolArray] = {}
        for stage in partition:
            needed = self.of_layers(chain.names[stage.begin : stage.end])
            for device in stage.devices:
                found[device] = found[device] | needed if device in found else needed
        return found

    def moved_bytes(self, chain: Chain, partition: Partition) -> int:
        """Bytes that the devices of a partition do not hold yet."""
        return self.lacking_bytes(self.wanted(chain, partition))
