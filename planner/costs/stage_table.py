"""What every possible stage of a problem costs: arrays of layers, and the sums over a stage.

A stage is the layers [first, last) of the layer graph's order on devices of one type. The figures
are those of :func:`planner.costs.placement.place`, to the last bit, but are added up by compiled
code, so that a search can ask for them hundreds of thousands of times a second.

A table of given stages has their layers one stage after the other, so that stages which are no
intervals of the graph's order are intervals of it.

What a stage recomputes and offloads is given by two limits. Each layer has a rank, the layer that
frees most bytes of a stash per second first: a stage recomputes its layers of a rank below the
first limit, and offloads those of the others whose rank is below the second. Where a job recomputes
the first numbered blocks of each stage alone, the first limit is their number. In a table of given
stages both limits are 1: their layers have the rank 0 if they are recomputed or offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs.layer_arrays import Floats, Ints, layer_arrays, static_arrays
from planner.costs.roofline import KINDS
from planner.costs.stage_spec import StageSpec
from planner.plan.problem import Problem
from planner.program.compiled import Block, block, compiled, entry, header, items, pointer

NEVER = 1 << 40
"""The rank of layers that are not recomputed, or not offloaded."""


_LONG, _REAL = np.dtype(np.int64), np.dtype(np.float64)
_NAMES = """seconds again_s may_run stash weight_stash peak saved_input host_stash rerun_rank
    offload_rank block divided_weights divided_gradients tensor_bytes producer last_user saver
    made_start made kept_start kept user_start user held_start held held_before static traffic
    summed gradient users crossing crossing_gradient sent returned gathered
    returned_gathered""".split()
(
    TABLE, SECONDS, AGAIN_S, MAY_RUN, STASH, WEIGHT_STASH, PEAK, SAVED_INPUT, HOST_STASH,
    RERUN_RANK, OFFLOAD_RANK, BLOCK, DIVIDED_WEIGHTS, DIVIDED_GRADIENTS, TENSOR_BYTES, PRODUCER,
    LAST_USER, SAVER, MADE_START, MADE, KEPT_START, KEPT, USER_START, USER, HELD_START, HELD,
    HELD_BEFORE, STATIC, TRAFFIC, SUMMED, GRADIENT, USERS, CROSSING, CROSSING_GRADIENT, SENT,
    RETURNED, GATHERED, RETURNED_GATHERED,
) = block(
    "types layers tensors parameters holders in_blocks",
    reals="",
    **{name: _REAL if name in ("seconds", "again_s", "traffic") else _LONG for name in _NAMES},
)  # fmt: skip
"""The arrays of a table. K types, N layers, B tensors, P parameters.

seconds: K x N x 4; of each operation, without recomputation.
again_s: K x N; that recomputation adds to a backward or an input gradient.
may_run: K x N; whether a type may run a layer.
stash, weight_stash, peak, saved_input: K x N; bytes, as :class:`Layer` has them.
host_stash: K x N; bytes of a stash that an offload takes to the host.
rerun_rank, offload_rank: N; see the module.
block: N; number of the numbered block that a layer is in, -1: none.
divided_weights, divided_gradients: N; bytes of weights that are put together around a layer
    where several devices divide them, and of their gradients.
tensor_bytes: K x B.
producer: B; layer that makes a tensor.
last_user: B; last layer that uses it.
saver: B; layer that keeps it in its stash; -1: none.
made_start, made: tensors that each layer makes, one layer after the other.
kept_start, kept: tensors that each layer saves.
user_start, user: layers that use each tensor.
held_start, held, held_before: parameters that each layer uses, and the layer before it that
    uses the same one, -1: none.
static: K x H x P; bytes that a parameter takes on a device, by how many devices share its
    optimizer state: one, two, …
traffic: K x P; bytes that the optimizer's step moves.
summed: K x P; bytes that a tensor-parallel group sums before it.
gradient: K x P; bytes of the gradient; 0 of frozen parameters.
users: P; number of layers that use a parameter.
crossing, crossing_gradient: K x (N + 1); bytes at each cut that the receiver of activations
    holds, and the receiver of their gradients.
sent, returned: K x (N + 1); bytes of the messages over each cut, by the receiver's type.
gathered, returned_gathered: K x (N + 1); of these, what a group gathers.
"""


FIGURES = np.dtype(
    [
        *((f"{kind}_s", np.float64) for kind in KINDS),
        ("step_traffic", np.float64),
        *(
            (name, np.int64)
            for name in (
                "static_bytes workspace_bytes split_workspace_bytes stash_bytes "
                "weight_stash_bytes offload_bytes summed_bytes gradient_bytes may_run"
            ).split()
        ),
    ]
)
"""The figures of a stage on one type, as :class:`planner.costs.placed_pipeline.PlacedStage` has
them, but for: ``step_traffic``, bytes that the optimizer's step moves; ``summed_bytes`` that a
group sums before it; ``gradient_bytes`` that replicas of the stage reduce, those of parameters
that later or earlier layers use as well included; ``may_run``, whether the type may run it."""


@compiled
def stage_figures(
    t: Any, kind: int, first: int, last: int, rerun: int, offload: int, holders: int, out: Any
) -> None:
    """Write the figures of the layers [first, last) on a type.

    Args:
        t: pointer to the table.
        kind: number of the type.
        first: the first layer.
        last: the one after the last.
        rerun: the limit on recomputed layers.
        offload: the limit on offloaded ones.
        holders: devices that share the optimizer's state, and divide what is divided; those beyond
            the table's count as the most there.
        out: a record of :data:`FIGURES`.
    """
    h = header(t, TABLE)
    whole_s = forward_s = input_s = weight_s = traffic = 0.0
    static = stash = weight_stash = host = summed = gradient = 0
    workspace, split, may_run, share = 0, 0, 1, min(holders, h.holders) - 1
    for layer in range(first, last):
        at, again = kind * h.layers + layer, is_again(t, first, layer, rerun)
        again_s = items(t, AGAIN_S)[at] if again else 0.0
        whole_s += items(t, SECONDS)[4 * at] + again_s
        forward_s += items(t, SECONDS)[4 * at + 1]
        input_s += items(t, SECONDS)[4 * at + 2] + again_s
        weight_s += items(t, SECONDS)[4 * at + 3]
        may_run = min(may_run, items(t, MAY_RUN)[at])
        kept = items(t, SAVED_INPUT)[at] if again else items(t, STASH)[at]
        late, peak = items(t, WEIGHT_STASH)[at], items(t, PEAK)[at]
        if holders > 1:
            peak += items(t, DIVIDED_WEIGHTS)[layer] + items(t, DIVIDED_GRADIENTS)[layer]
        workspace = max(workspace, peak) - kept
        split = max(split + late - kept, peak - kept + max(late - kept, 0))
        weight_stash += late
        if not again:
            stash += kept
            received = _received_bytes(t, kind, first, layer)
            stash -= received
            weight_stash -= received
        if _moves(t, first, layer, rerun, offload):
            host += items(t, HOST_STASH)[at]
            host -= _shared_bytes(t, kind, first, layer, last, rerun, offload)
        stash += _bytes_for_rerun(t, kind, first, layer, last, rerun)
        for i in range(items(t, HELD_START)[layer], items(t, HELD_START)[layer + 1]):
            if items(t, HELD_BEFORE)[i] >= first:
                continue
            of_type = kind * h.parameters + items(t, HELD)[i]
            shared = (kind * h.holders + share) * h.parameters + items(t, HELD)[i]
            static += items(t, STATIC)[shared]
            traffic += items(t, TRAFFIC)[of_type] / (share + 1)
            summed += items(t, SUMMED)[of_type]
            gradient += items(t, GRADIENT)[of_type]
    received = items(t, CROSSING)[kind * (h.layers + 1) + first]
    out.B_s, out.F_s, out.I_s, out.W_s = whole_s, forward_s, input_s, weight_s
    out.step_traffic, out.static_bytes = traffic, static
    out.workspace_bytes, out.split_workspace_bytes = max(workspace, 0), max(workspace, split, 0)
    out.stash_bytes, out.weight_stash_bytes = stash + received, weight_stash + received
    out.offload_bytes, out.summed_bytes = max(host, 0), summed
    out.gradient_bytes, out.may_run = gradient, may_run


@compiled
def is_again(t: Any, first: int, layer: int, rerun: int) -> bool:
    """Return whether a stage that begins at a layer recomputes another."""
    if not header(t, TABLE).in_blocks:
        return bool(items(t, RERUN_RANK)[layer] < rerun)
    block_of, begin = items(t, BLOCK), first
    if block_of[layer] < 0:
        return False
    while block_of[begin] < 0:
        begin += 1
    return bool(block_of[layer] - block_of[begin] < rerun)


@compiled
def _moves(t: Any, first: int, layer: int, rerun: int, offload: int) -> bool:
    return bool(items(t, OFFLOAD_RANK)[layer] < offload) and not is_again(t, first, layer, rerun)


@compiled
def _received_bytes(t: Any, kind: int, first: int, layer: int) -> int:
    """Return the bytes of what a layer saves that the stage has received, and counts there."""
    bytes_ = 0
    for i in range(items(t, KEPT_START)[layer], items(t, KEPT_START)[layer + 1]):
        tensor = items(t, KEPT)[i]
        if items(t, PRODUCER)[tensor] < first <= items(t, LAST_USER)[tensor]:
            bytes_ += items(t, TENSOR_BYTES)[kind * header(t, TABLE).tensors + tensor]
    return bytes_


@compiled
def _shared_bytes(
    t: Any, kind: int, first: int, layer: int, last: int, rerun: int, offload: int
) -> int:
    """Return the bytes of what an offloaded layer saves that others than such layers hold too."""
    bytes_ = 0
    for i in range(items(t, KEPT_START)[layer], items(t, KEPT_START)[layer + 1]):
        tensor = items(t, KEPT)[i]
        maker = items(t, PRODUCER)[tensor]
        is_shared = maker < first or not _moves(t, first, maker, rerun, offload)
        for at in range(items(t, USER_START)[tensor], items(t, USER_START)[tensor + 1]):
            user = items(t, USER)[at]
            is_shared = is_shared or (user < last and not _moves(t, first, user, rerun, offload))
        if is_shared:
            bytes_ += items(t, TENSOR_BYTES)[kind * header(t, TABLE).tensors + tensor]
    return bytes_


@compiled
def _bytes_for_rerun(t: Any, kind: int, first: int, layer: int, last: int, rerun: int) -> int:
    """Return the bytes of what a layer makes that is kept only as a recomputed layer reads it."""
    bytes_ = 0
    for i in range(items(t, MADE_START)[layer], items(t, MADE_START)[layer + 1]):
        tensor = items(t, MADE)[i]
        saver = items(t, SAVER)[tensor]
        if first <= saver < last and not is_again(t, first, saver, rerun):
            continue
        for at in range(items(t, USER_START)[tensor], items(t, USER_START)[tensor + 1]):
            user = items(t, USER)[at]
            if user < last and is_again(t, first, user, rerun):
                bytes_ += items(t, TENSOR_BYTES)[kind * header(t, TABLE).tensors + tensor]
                break
    return bytes_


@entry
def fill_figures(
    table: Any, kind: int, first: int, last: int, rerun: int, offload: int, holders: int, out: Any
) -> None:
    """Write the figures of all stages from a type, a first layer and an end on.

    Args:
        table: header of the table.
        kind: the first type.
        first: the first layer of the first stages.
        last: the first end.
        rerun: the limit on recomputed layers.
        offload: the limit on offloaded ones.
        holders: as :func:`stage_figures` has them.
        out: array of :data:`FIGURES`: types x first layers x ends.
    """
    for k in range(out.shape[0]):
        for f in range(out.shape[1]):
            for n in range(max(0, first + f + 1 - last), out.shape[2]):
                begin, end, place = first + f, last + n, out[k, f, n]
                stage_figures(pointer(table), kind + k, begin, end, rerun, offload, holders, place)


@dataclass(frozen=True)
class StageTable:
    """The stages of a problem.

    Attributes:
        problem: the model, cluster and job.
        stages: given stages, no edge backwards; none: all intervals of the graph's order.
    """

    problem: Problem
    stages: tuple[StageSpec, ...] = ()

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order in which stages cut them; at last those of no stage."""
        graph = self.problem.graph
        given = [name for stage in self.stages for name in graph.in_order(stage.layers)]
        return tuple(dict.fromkeys((*given, *graph.layers)))

    @cached_property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """The first layer of each given stage, and the one behind its last."""
        return tuple(pairwise(accumulate((len(s.layers) for s in self.stages), initial=0)))

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Names of the device types, in the order of the cluster file."""
        return tuple(self.problem.cluster.device_types)

    @cached_property
    def arrays(self) -> SimpleNamespace:
        """What compiled code reads, by the names of the block's tables."""
        return SimpleNamespace(**(self._of_given() if self.stages else self._of_all()))

    def _of_all(self) -> dict[str, NDArray[Any]]:
        found = layer_arrays(self.problem, self.layers)
        again_s, seconds = found["again_s"].mean(axis=0), found["seconds"][:, :, 0].mean(axis=0)
        freed = (found["stash"] - found["saved_input"]).mean(axis=0)
        return found | {
            "rerun_rank": _ranks(freed, again_s),
            "offload_rank": _ranks(found["host_stash"].mean(axis=0), seconds),
            "static": static_arrays(self.problem),
        }

    def _of_given(self) -> dict[str, NDArray[Any]]:
        """Return the arrays but for static bytes, which depend on who holds tied parameters."""
        found = layer_arrays(self.problem, self.layers)
        again = {name for stage in self.stages for name in stage.recompute}
        away = {name for stage in self.stages for name in stage.offload}
        kinds, parameters = found["traffic"].shape
        return found | {
            "rerun_rank": np.array([NEVER * (name not in again) for name in self.layers]),
            "offload_rank": np.array([NEVER * (name not in away) for name in self.layers]),
            "static": np.zeros((kinds, 1, parameters), np.int64),
        }

    @cached_property
    def block(self) -> Block:
        """The arrays in a block."""
        arrays = self.arrays
        rows = {SECONDS + n: np.ravel(getattr(arrays, name)) for n, name in enumerate(_NAMES)}
        found = Block(TABLE, {number: len(row) for number, row in rows.items()})
        for number, row in rows.items():
            found[number][:] = row
        numbers = found.numbers
        numbers["types"], numbers["layers"] = arrays.again_s.shape
        numbers["tensors"] = len(arrays.producer)
        numbers["holders"], numbers["parameters"] = arrays.static.shape[1:]
        numbers["in_blocks"] = self.problem.job.recompute == "blocks" and not self.stages
        return found

    def figures(
        self,
        type_name: str,
        first: int,
        last: int,
        *,
        rerun: int = 0,
        offload: int = 0,
        holders: int = 1,
    ) -> np.record:
        """Return the figures of a stage as a record of :data:`FIGURES`; see the module."""
        rows, kind = np.zeros((1, 1, 1), FIGURES).view(np.recarray), self.types.index(type_name)
        fill_figures(self.block.header, kind, first, last, rerun, offload, holders, rows)
        found: np.record = rows[0, 0, 0]
        return found

    def all_figures(
        self, *, rerun: int = 0, offload: int = 0, holders: int = 1
    ) -> NDArray[np.void]:
        """Return the figures of all stages: K x N x (N + 1), by type, first layer and end."""
        kinds, layers = self.arrays.stash.shape
        rows = np.zeros((kinds, layers, layers + 1), FIGURES).view(np.recarray)
        fill_figures(self.block.header, 0, 0, 0, rerun, offload, holders, rows)
        return rows

    def recomputed(self, first: int, last: int, rerun: int) -> tuple[str, ...]:
        """Return the names of the layers that a stage recomputes."""
        is_again = self._is_again(first, last, rerun)
        return tuple(np.array(self.layers, dtype=object)[first:last][is_again])

    def offloaded(self, first: int, last: int, rerun: int, offload: int) -> tuple[str, ...]:
        """Return the names of the layers whose stash a stage takes to the host."""
        moves = (self.arrays.offload_rank[first:last] < offload) & ~self._is_again(
            first, last, rerun
        )
        return tuple(np.array(self.layers, dtype=object)[first:last][moves])

    def _is_again(self, first: int, last: int, rerun: int) -> NDArray[np.bool_]:
        """Return which layers of a stage it recomputes, as :func:`is_again` has it."""
        number: Ints
        if self.problem.job.recompute != "blocks":
            number = self.arrays.rerun_rank[first:last]
            return number < rerun
        number = self.arrays.block[first:last]
        begin = int(number[number >= 0][:1].sum())
        return np.logical_and(number >= 0, number - begin < rerun)


def _ranks(gain: Floats, cost: Floats) -> Ints:
    """Return the rank of each layer by gain over cost; of equal ones the earlier comes first."""
    ratio = gain / np.maximum(cost, 1e-30)
    ranks = np.full(len(gain), NEVER)
    order = [n for n in np.argsort(-ratio, kind="stable") if gain[n] > 0]
    ranks[order] = np.arange(len(order))
    return ranks
