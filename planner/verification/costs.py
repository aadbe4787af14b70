"""Seconds and bytes of a plan's stages, by docs/cost_model.md and docs/memory.md."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.model.graph_record import Boundary, Layer, Parameter
from planner.plan.plan import Plan
from planner.verification.layer_costs import ProblemCosts, collective_s, moved_bytes
from planner.verification.routes import Routes

_KINDS = "FIWB"
"""The columns of tables of seconds."""
_GATHERS, _SUMS, _AGAIN = (np.array(row) for row in ((1, 1, 0, 1), (0, 0, 1, 1), (0, 1, 0, 1)))
"""Operations that gather divided weights, that sum their gradients, that repeat a forward."""


class StageBytes(NamedTuple):
    """What a stage holds and hands on, for one microbatch; the names are those of docs/memory.md.

    Attributes:
        static: weights, gradients and optimizer state.
        workspace: while whole backwards run.
        split_workspace: while an input gradient runs apart.
        stash: from the forward until the backward, with what is received.
        weight_stash: from the input gradient until the weight gradient.
        received, sent: activations.
        gradient_sent, gradient_received: their gradients.
        message, gradient_message: bytes of messages onwards and back. Where microbatches have
            several lengths these are the mean, and all others of the longest.
        gathered, gradient_gathered: of these, what arrives in parts.
        offloaded: of the stash, what goes to the host between forward and backward.
    """

    static: int
    workspace: int
    split_workspace: int
    stash: int
    weight_stash: int
    received: int
    sent: int
    gradient_sent: int
    gradient_received: int
    message: int
    gradient_message: int
    gathered: int
    gradient_gathered: int
    offloaded: int


class PlanCosts:
    """Every time and size that the times of a plan follow from.

    Args:
        plan: of a form that holds: every layer in exactly one stage, no edge backwards; with its
            tensor-parallel groups as devices.

    Attributes:
        single: costs of single layers and parameters.
        routes: of the cluster.
        stages_on: the stages of each device.
        layers: of each stage, in the order of the layer graph, with the figures of its devices.
        parameters: by name.
        holders: the stages that hold a parameter, ascending, by its name.
        divided: names of the parameters whose weights and gradients replicas divide.
        sharers: how many devices share the optimizer's state of a parameter; none: nobody does.
        bytes: of each stage.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, graph, stages = plan, plan.model.graph, plan.stages
        self.single = ProblemCosts(plan.cluster, plan.job)
        self.routes = Routes(plan.cluster)
        self.stages_on: defaultdict[str, list[int]] = defaultdict(list)
        for stage in stages:
            for device in stage.devices:
                self.stages_on[device].append(stage.index)
        self._stage_of = {name: stage.index for stage in stages for name in stage.layers}
        self._rerun = {name for stage in stages for name in stage.recompute}
        kinds = [plan.cluster.type_of(stage.devices[0]) for stage in stages]
        self._graphs = [graph.on_types.get(kind, graph) for kind in kinds]
        self.layers: list[list[Layer]] = [
            [row for row in of_stage.layers if self._stage_of[row.name] == index]
            for index, of_stage in enumerate(self._graphs)
        ]
        self.parameters: dict[str, Parameter] = {}
        holders: defaultdict[str, list[int]] = defaultdict(list)
        for index, rows in enumerate(self.layers):
            known = {row.name: row for row in self._graphs[index].parameters}
            for name in dict.fromkeys(name for row in rows for name in row.parameters):
                self.parameters[name] = known[name]
                holders[name].append(index)
        self.holders = {name: tuple(found) for name, found in holders.items()}
        used = Counter(name for row in graph.layers for name in set(row.parameters))
        self.divided = {
            name
            for name, count in used.items()
            if plan.job.shards_parameters and count == 1 and self.parameters[name].trainable
        }
        self.sharers = {
            name: len(self.devices_of(found[:1] if self.in_turn(found) else found))
            for name, found in self.holders.items()
            if plan.job.shards_state
        }
        self.collective_s = self._collective_s()
        self._table = cache(self._layer_seconds)
        self._totals = cache(self._stage_seconds)
        self.bytes = [self._bytes_of(index) for index in range(len(stages))]

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that hold stages, in the order of these."""
        return tuple(self.stages_on)

    def devices_of(self, stages: Iterable[int]) -> set[str]:
        """Return the devices of several stages."""
        return {device for index in stages for device in self.plan.stages[index].devices}

    def in_order(self, devices: Iterable[str]) -> tuple[str, ...]:
        """Return devices in the order of the cluster, which is that of their ring."""
        return tuple(sorted(devices, key=self.plan.cluster.numbers.__getitem__))

    def in_turn(self, stages: Sequence[int]) -> bool:
        """Return whether replicas of each of several stages reduce a gradient before these do."""
        counts = {len(self.plan.stages[stage].devices) for stage in stages}
        return self.plan.runtime.tied == "in_turn" and len(stages) > 1 and len(counts) == 1

    # --- seconds ----------------------------------------------------------------------------------

    def seconds(self, stage: int, kind: str, device: str) -> float:
        """Return the seconds of an operation."""
        return self._totals(stage, self.plan.cluster.type_of(device))[_KINDS.index(kind)]

    def before_s(self, stage: int, layer: str, kind: str, device: str) -> float:
        """Return the seconds that an operation spends on the layers before one of its stage."""
        place = [row.name for row in self.layers[stage]].index(layer)
        table = self._table(stage, self.plan.cluster.type_of(device))
        return float(table[:place, _KINDS.index(kind)].sum())

    def _stage_seconds(self, stage: int, type_name: str) -> list[float]:
        host_s = self.plan.behaviour.computation_us * 1e-6
        found: list[float] = (self._table(stage, type_name).sum(axis=0) + host_s).tolist()
        return found

    def _layer_seconds(self, stage: int, type_name: str) -> NDArray[np.float64]:
        """Return the seconds of a stage's layers (rows) in its operations (columns F, I, W, B)."""
        rows = []
        for layer in self.layers[stage]:
            seconds = np.array(self.single.seconds(layer, type_name))
            if layer.name in self._rerun:
                seconds += _AGAIN * self.single.seconds(layer, type_name, loading=False)[0]
            gather_s, sum_s = self.collective_s[stage].get(layer.name, (0.0, 0.0))
            rows.append(seconds + gather_s * _GATHERS + sum_s * _SUMS)
        return np.array(rows)

    def _collective_s(self) -> list[dict[str, tuple[float, float]]]:
        """The seconds of a gather of each layer's weights, and of a sum of its gradients, by stage.

        Rings of all stages share links; one of the same devices counts once.
        """
        held = [self._in_parts(stage.index) for stage in self.plan.stages]
        rings = [
            self.in_order(stage.devices) if rows else ()
            for stage, rows in zip(self.plan.stages, held, strict=True)
        ]
        edges = {ring: [*pairwise((*ring, ring[0]))] for ring in rings if ring}
        figures = iter(self.routes.step_figures([e for row in edges.values() for e in row]))
        of_ring = {ring: [next(figures) for _ in row] for ring, row in edges.items()}

        def seconds(ring: tuple[str, ...], bytes_: int) -> float:
            part, steps = bytes_ / len(ring), len(ring) - 1
            return steps * max(latency_s + part / width for latency_s, width in of_ring[ring])

        return [
            {
                name: (
                    seconds(ring, sum(row.bytes for row in rows)),
                    seconds(ring, sum(map(self.single.gradient_bytes, rows))),
                )
                for name, rows in of_stage.items()
            }
            for ring, of_stage in zip(rings, held, strict=True)
        ]

    def _in_parts(self, stage: int) -> dict[str, list[Parameter]]:
        """Return the parameters, by layer, of which each replica of a stage has a part."""
        if len(self.plan.stages[stage].devices) == 1:
            return {}
        found = {
            layer.name: [self.parameters[n] for n in layer.parameters if n in self.divided]
            for layer in self.layers[stage]
        }
        return {name: rows for name, rows in found.items() if any(row.bytes for row in rows)}

    def gather_s(self, bytes_: int, device: str) -> float:
        """Return the seconds in which a group makes whole tensors of the parts that it received."""
        return collective_s(self.plan.cluster.device_type(device), "all_gather", bytes_)

    def optimizer_s(self, device: str) -> float:
        """Return the seconds of the step; a parameter that several stages hold counts once."""
        layers = [layer for stage in self.stages_on[device] for layer in self.layers[stage]]
        names = dict.fromkeys(name for layer in layers for name in layer.parameters)
        held = [row for row in map(self.parameters.__getitem__, names) if row.trainable]
        moved = sum(self.single.stepped_bytes(row) / self.sharers.get(row.name, 1) for row in held)
        kind = self.plan.cluster.device_type(device)
        # A group first sums the gradients of what each of its devices has whole.
        whole = sum(self.single.gradient_bytes(row) for row in held if row.summed)
        summed_s = collective_s(kind, "all_reduce", whole // kind.members)
        return summed_s + moved / (kind.memory_bandwidth_gb_per_s * kind.optimizer_efficiency * 1e9)

    def copy_s(self, stage: int, device: str) -> float:
        """Return the seconds in which what a stage offloads passes a device's host link."""
        rate = self.plan.cluster.device_type(device).host_link_gb_per_s
        return self.bytes[stage].offloaded / (rate * 1e9) if rate else math.inf

    # --- bytes ------------------------------------------------------------------------------------

    def capacity_bytes(self, device: str) -> int:
        """Return the bytes that a plan may use."""
        return self.single.capacity_bytes(self.plan.cluster.type_of(device))

    def constant_bytes(self, device: str) -> int:
        """Held at all times: static memory and the largest workspace."""
        rows = [self.bytes[stage] for stage in self.stages_on[device]]
        return sum(row.static for row in rows) + max(row.workspace for row in rows)

    def split_bytes(self, stage: int, device: str) -> int:
        """Held on top of that while an input gradient of the stage runs apart."""
        counted = max(self.bytes[other].workspace for other in self.stages_on[device])
        return max(0, self.bytes[stage].split_workspace - counted)

    def _bytes_of(self, index: int) -> StageBytes:
        layers, last = self.layers[index], len(self._graphs) - 1
        received, sent = self._crossing(index, index), self._crossing(index + 1, index)
        back, forth = _with_gradient(received), _with_gradient(sent)
        # As many bytes are sent as the other side holds of them.
        onwards = self._crossing(index + 1, min(index + 1, last))
        returned = _with_gradient(self._crossing(index, max(index - 1, 0)))
        # What a layer that does not run again keeps of the received tensors is in its stash.
        besides = sum(row.bytes for row in received if self._keeper(row) != index)
        workspace, split_workspace = self._workspaces(index)
        names = dict.fromkeys(name for row in layers for name in row.parameters)
        static = (
            self.single.static_bytes(
                self.parameters[name], self.sharers.get(name, 1), in_parts=name in self.divided
            )
            for name in names
        )
        return StageBytes(
            static=sum(static),
            workspace=workspace,
            split_workspace=max(workspace, split_workspace),
            stash=self._kept_bytes(index) + besides,
            weight_stash=sum(row.kept_for_weights_bytes for row in layers) + besides,
            received=_sum(received),
            sent=_sum(sent),
            gradient_sent=_sum(back),
            gradient_received=_sum(forth),
            message=sum(map(moved_bytes, onwards)),
            gradient_message=sum(map(moved_bytes, returned)),
            gathered=sum(moved_bytes(row) for row in sent if row.parts > 1),
            gradient_gathered=sum(moved_bytes(row) for row in back if row.parts > 1),
            offloaded=self._offloaded_bytes(index),
        )

    def _crossing(self, cut: int, stage: int) -> list[Boundary]:
        """Tensors made before a cut and used behind it, with the bytes that a stage has of them."""
        return [
            tensor
            for tensor in self._graphs[stage].boundaries
            if self._stage_of[tensor.producer] < cut
            and any(self._stage_of[user] >= cut for user in tensor.users)
        ]

    def _keeper(self, tensor: Boundary) -> int | None:
        """The stage that keeps a tensor in the stash of a layer that does not run again."""
        if tensor.saved_by is None or tensor.saved_by in self._rerun:
            return None
        return self._stage_of[tensor.saved_by]

    def _offloaded_bytes(self, index: int) -> int:
        """Stashes of layers, less what others hold anyway until the backward.

        That is the batch, and tensors that the rest of the stage or the one before has too.
        """
        away = set(self.plan.stages[index].offload)
        staying = 0
        for tensor in self.plan.model.graph.boundaries if away else ():
            others = {tensor.producer, *tensor.users} - away
            is_held = any(self._stage_of[name] == index for name in others)
            if tensor.saved_by in away and (is_held or self._stage_of[tensor.producer] < index):
                staying += tensor.bytes
        rows = (row for row in self.plan.model.graph.layers if row.name in away)
        return max(0, sum(max(0, row.stash_bytes - row.batch_bytes) for row in rows) - staying)

    def _kept_bytes(self, index: int) -> int:
        """The stashes of layers, and tensors of the stage's own that layers start again from."""
        again = {row.name for row in self.layers[index] if row.name in self._rerun}
        own = [
            tensor
            for tensor in self._graphs[index].boundaries
            if self._stage_of[tensor.producer] == index
            and not again.isdisjoint(tensor.users)
            and self._keeper(tensor) != index
        ]
        stashes = (row.stash_bytes for row in self.layers[index] if row.name not in again)
        return sum(stashes) + _sum(own)

    def _workspaces(self, index: int) -> tuple[int, int]:
        """While whole backwards run, and while an input gradient runs apart.

        A layer's weights that are put together are whole while it runs, and its gradients too.
        """
        layers, in_parts = self.layers[index], self._in_parts(index)
        made, used = defaultdict[str, list[Boundary]](list), defaultdict[str, list[Boundary]](list)
        for tensor in self._graphs[index].boundaries:
            made[tensor.producer].append(tensor)
            for user in dict.fromkeys(tensor.users):
                used[user].append(tensor)
        peaks, kept = [], []
        for row in layers:
            held = [self.parameters[name] for name in dict.fromkeys(row.parameters)]
            whole = in_parts.get(row.name, ())
            extra = sum(p.bytes + self.single.gradient_bytes(p) for p in whole)
            peaks.append(peak_bytes(row, made[row.name], used[row.name], held) + extra)
            saved = _sum(tensor for tensor in used[row.name] if tensor.saved_by == row.name)
            kept.append(saved if row.name in self._rerun else row.stash_bytes)
        late = [row.kept_for_weights_bytes for row in layers]
        # The weight gradients' needs are all there before the input gradient ends.
        workspace, split = 0, sum(late) - sum(kept)
        for k, peak in enumerate(peaks):
            later = peak - sum(kept[k:])
            workspace = max(workspace, later)
            split = max(split, later + max(0, late[k] - kept[k]) + sum(late[k + 1 :]))
        return workspace, split


def peak_bytes(
    layer: Layer,
    made: Iterable[Boundary],
    used: Iterable[Boundary],
    parameters: Iterable[Parameter],
) -> int:
    """Return the most that a layer holds while it runs.

    Args:
        layer: which.
        made: tensors that it makes.
        used: tensors that it uses.
        parameters: that it uses.
    """
    if layer.peak_bytes is not None:
        return layer.peak_bytes
    gradients = [row.bytes for row in parameters if row.trainable]
    passed = 2 * _sum(made) + _sum(_with_gradient(used))
    return layer.stash_bytes + layer.again_bytes + passed + max(gradients, default=0)


def _sum(tensors: Iterable[Boundary]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _with_gradient(tensors: Iterable[Boundary]) -> list[Boundary]:
    return [tensor for tensor in tensors if tensor.requires_grad]
