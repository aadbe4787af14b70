"""What every possible stage of a problem costs: arrays of layers, and the sums over a stage.

A stage is the layers [first, last) of the layer graph's order on devices of one type. The figures
are those of :func:`planner.costs.placement.place`, to the last bit, but are added up by compiled
code, so that a search can ask for them hundreds of thousands of times a second.

What a stage recomputes and offloads is given by two limits. Each layer has a rank, the layer that
frees most bytes of a stash per second first: a stage recomputes its layers of a rank below the
first limit, and offloads those of the others whose rank is below the second. Where a job recomputes
the first numbered blocks of each stage alone, the first limit is their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.gradients import gradient_bytes
from planner.costs.optimizer import static_bytes, step_traffic_bytes
from planner.costs.roofline import layer_times, loaded_times
from planner.model.blocks import block_name
from planner.model.graph_record import Layer, Parameter
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.program.compiled import compiled, entry

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
KINDS = "BFIW"
"""The last axis of seconds: whole backward, forward, input gradient, weight gradient."""
NEVER = 1 << 40
"""The rank of layers that are not recomputed, or not offloaded."""


class TableArrays(NamedTuple):
    """The arrays that compiled code reads. K types, N layers, B tensors, P parameters.

    Attributes:
        seconds: K x N x 4; of each operation, without recomputation.
        again_s: K x N; that recomputation adds to a backward or an input gradient.
        may_run: K x N; whether a type may run a layer.
        stash, weight_stash, peak, saved_input: K x N; bytes, as :class:`Layer` has them.
        host_stash: K x N; bytes of a stash that an offload takes to the host.
        rerun_rank, offload_rank: N; see the module.
        block: N; number of the numbered block that a layer is in, -1: none.
        in_blocks: whether the first limit counts blocks.
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

    seconds: Floats
    again_s: Floats
    may_run: NDArray[np.bool_]
    stash: Ints
    weight_stash: Ints
    peak: Ints
    saved_input: Ints
    host_stash: Ints
    rerun_rank: Ints
    offload_rank: Ints
    block: Ints
    in_blocks: bool
    tensor_bytes: Ints
    producer: Ints
    last_user: Ints
    saver: Ints
    made_start: Ints
    made: Ints
    kept_start: Ints
    kept: Ints
    user_start: Ints
    user: Ints
    held_start: Ints
    held: Ints
    held_before: Ints
    static: Ints
    traffic: Floats
    summed: Ints
    gradient: Ints
    users: Ints
    crossing: Ints
    crossing_gradient: Ints
    sent: Ints
    returned: Ints
    gathered: Ints
    returned_gathered: Ints


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


@entry
def stage_figures(
    t: TableArrays,
    kind: int,
    first: int,
    last: int,
    rerun: int,
    offload: int,
    holders: int,
    out: Any,
    at: int,
) -> None:
    """Write the figures of the layers [first, last) on a type.

    Args:
        t: the :class:`TableArrays`.
        kind: number of the type.
        first: the first layer.
        last: the one after the last.
        rerun: the limit on recomputed layers.
        offload: the limit on offloaded ones.
        holders: devices that share the optimizer's state; those beyond the arrays' count as the
            most there.
        out: an array of :data:`FIGURES`.
        at: the row to write.
    """
    whole_s = forward_s = input_s = weight_s = traffic = 0.0
    static = stash = weight_stash = host = summed = gradient = 0
    workspace = split = 0
    may_run = 1
    share = min(holders, t.static.shape[1]) - 1
    for layer in range(first, last):
        again = _is_again(t, first, layer, rerun)
        moves = not again and t.offload_rank[layer] < offload
        seconds = t.seconds[kind, layer]
        again_s = t.again_s[kind, layer] if again else 0.0
        whole_s += seconds[0] + again_s
        forward_s += seconds[1]
        input_s += seconds[2] + again_s
        weight_s += seconds[3]
        if not t.may_run[kind, layer]:
            may_run = 0
        kept = t.saved_input[kind, layer] if again else t.stash[kind, layer]
        late = t.weight_stash[kind, layer]
        peak = t.peak[kind, layer]
        workspace = max(workspace, peak) - kept
        split = max(split + late - kept, peak - kept + max(late - kept, 0))
        weight_stash += late
        if not again:
            stash += kept
        if moves:
            host += t.host_stash[kind, layer]
        for i in range(t.kept_start[layer], t.kept_start[layer + 1]):
            tensor = t.kept[i]
            if not again and t.producer[tensor] < first <= t.last_user[tensor]:
                stash -= t.tensor_bytes[kind, tensor]
                weight_stash -= t.tensor_bytes[kind, tensor]
            if moves and _is_shared(t, tensor, first, last, rerun, offload):
                host -= t.tensor_bytes[kind, tensor]
        for i in range(t.made_start[layer], t.made_start[layer + 1]):
            if _is_kept_for_rerun(t, t.made[i], first, last, rerun):
                stash += t.tensor_bytes[kind, t.made[i]]
        for i in range(t.held_start[layer], t.held_start[layer + 1]):
            if t.held_before[i] >= first:
                continue
            parameter = t.held[i]
            static += t.static[kind, share, parameter]
            traffic += t.traffic[kind, parameter] / (share + 1)
            summed += t.summed[kind, parameter]
            gradient += t.gradient[kind, parameter]
    received = t.crossing[kind, first]
    row = out[at]
    row.B_s = whole_s
    row.F_s = forward_s
    row.I_s = input_s
    row.W_s = weight_s
    row.step_traffic = traffic
    row.static_bytes = static
    row.workspace_bytes = max(workspace, 0)
    row.split_workspace_bytes = max(workspace, split, 0)
    row.stash_bytes = stash + received
    row.weight_stash_bytes = weight_stash + received
    row.offload_bytes = max(host, 0)
    row.summed_bytes = summed
    row.gradient_bytes = gradient
    row.may_run = may_run


def _reruns(t: TableArrays, first: int, layer: int, rerun: int) -> bool:
    """Return whether a stage that begins at a layer recomputes another."""
    if not t.in_blocks:
        return bool(t.rerun_rank[layer] < rerun)
    if t.block[layer] < 0:
        return False
    begin = first
    while t.block[begin] < 0:
        begin += 1
    return bool(t.block[layer] - t.block[begin] < rerun)


_is_again = compiled(_reruns)


@compiled
def _is_shared(
    t: TableArrays, tensor: int, first: int, last: int, rerun: int, offload: int
) -> bool:
    """Return whether something else than offloaded layers of a stage holds a tensor too."""
    maker = t.producer[tensor]
    if maker < first or not _moves(t, first, maker, rerun, offload):
        return True
    for at in range(t.user_start[tensor], t.user_start[tensor + 1]):
        user = t.user[at]
        if user < last and not _moves(t, first, user, rerun, offload):
            return True
    return False


@compiled
def _moves(t: TableArrays, first: int, layer: int, rerun: int, offload: int) -> bool:
    return t.offload_rank[layer] < offload and not _is_again(t, first, layer, rerun)


@compiled
def _is_kept_for_rerun(t: TableArrays, tensor: int, first: int, last: int, rerun: int) -> bool:
    """Return whether a tensor of a stage is kept only because a recomputed layer reads it."""
    saver = t.saver[tensor]
    if first <= saver < last and not _is_again(t, first, saver, rerun):
        return False
    for at in range(t.user_start[tensor], t.user_start[tensor + 1]):
        user = t.user[at]
        if user < last and _is_again(t, first, user, rerun):
            return True
    return False


@entry
def fill_intervals(t: TableArrays, rerun: int, offload: int, holders: int, out: Any) -> None:
    """Write the figures of all stages: an array of :data:`FIGURES`, K x N x (N + 1)."""
    kinds, layers = t.stash.shape
    for kind in range(kinds):
        for first in range(layers):
            for last in range(first + 1, layers + 1):
                stage_figures(t, kind, first, last, rerun, offload, holders, out[kind, first], last)


@dataclass(frozen=True)
class StageTable:
    """The stages of a problem.

    Attributes:
        problem: the model, cluster and job.
    """

    problem: Problem

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order in which stages cut them."""
        return tuple(self.problem.graph.layers)

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Names of the device types, in the order of the cluster file."""
        return tuple(self.problem.cluster.device_types)

    @cached_property
    def arrays(self) -> TableArrays:
        """What compiled code reads."""
        return _arrays(self.problem)

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
        rows = np.zeros(1, FIGURES)
        stage_figures(
            self.arrays, self.types.index(type_name), first, last, rerun, offload, holders, rows, 0
        )
        found: np.record = rows.view(np.recarray)[0]
        return found

    def all_figures(
        self, *, rerun: int = 0, offload: int = 0, holders: int = 1
    ) -> NDArray[np.void]:
        """Return the figures of all stages: K x N x (N + 1), by type, first layer and end."""
        kinds, layers = self.arrays.stash.shape
        rows = np.zeros((kinds, layers, layers + 1), FIGURES)
        fill_intervals(self.arrays, rerun, offload, holders, rows)
        return rows

    def recomputed(self, first: int, last: int, rerun: int) -> tuple[str, ...]:
        """Return the names of the layers that a stage recomputes."""
        again = (n for n in range(first, last) if _reruns(self.arrays, first, n, rerun))
        return tuple(self.layers[n] for n in again)

    def offloaded(self, first: int, last: int, rerun: int, offload: int) -> tuple[str, ...]:
        """Return the names of the layers whose stash a stage takes to the host."""
        t = self.arrays
        ranked = (n for n in range(first, last) if t.offload_rank[n] < offload)
        return tuple(self.layers[n] for n in ranked if not _reruns(t, first, n, rerun))


def _arrays(problem: Problem) -> TableArrays:
    names = list(problem.cluster.device_types)
    graphs = [problem.graph.on(name) for name in names]
    layers = [list(graph.record.layers) for graph in graphs]
    times = _Times.of(problem, names, layers)
    stash = _by_type(layers, lambda row: row.stash_bytes)
    saved_input = np.array([[*graph.saved_input_bytes.values()] for graph in graphs])
    host_stash = _by_type(layers, lambda row: max(0, row.stash_bytes - row.batch_bytes))
    freed = (stash - saved_input).mean(axis=0)
    tensors = _Tensors.of(problem.graph)
    parameters = _Parameters.of(problem, graphs)
    cuts = [_Cuts.of(graph) for graph in graphs]
    return TableArrays(
        seconds=times.seconds,
        again_s=times.again_s,
        may_run=np.array(
            [[r.may_run_on(n) for r in row] for n, row in zip(names, layers, strict=True)]
        ),
        stash=stash,
        weight_stash=_by_type(layers, lambda row: row.kept_for_weights_bytes),
        peak=np.array([[*graph.peak_bytes.values()] for graph in graphs]),
        saved_input=saved_input,
        host_stash=host_stash,
        rerun_rank=_ranks(freed, times.again_s.mean(axis=0)),
        offload_rank=_ranks(host_stash.mean(axis=0), times.seconds[:, :, 0].mean(axis=0)),
        block=_blocks(problem.graph),
        in_blocks=problem.job.recompute == "blocks",
        tensor_bytes=np.array([[b.bytes for b in g.record.boundaries] for g in graphs]).reshape(
            len(graphs), -1
        ),
        **tensors._asdict(),
        **parameters._asdict(),
        **{field: np.array([getattr(row, field) for row in cuts]) for field in _Cuts._fields},
    )


def _by_type(layers: Sequence[Sequence[Layer]], figure: Callable[[Layer], int]) -> Ints:
    return np.array([[figure(row) for row in of_type] for of_type in layers], dtype=np.int64)


def _ranks(gain: Floats, cost: Floats) -> Ints:
    """Return the rank of each layer by gain over cost; of equal ones the earlier comes first."""
    ratio = gain / np.maximum(cost, np.finfo(float).tiny)
    ranks = np.full(len(gain), NEVER)
    order = [n for n in np.argsort(-ratio, kind="stable") if gain[n] > 0]
    ranks[order] = np.arange(len(order))
    return ranks


def _blocks(graph: LayerGraph) -> Ints:
    number: dict[str, int] = {}
    names = [block_name(layer) for layer in graph.layers]
    return np.array(
        [-1 if name is None else number.setdefault(name, len(number)) for name in names]
    )


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return where each row begins, and all rows one after the other."""
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return starts, np.array([x for row in rows for x in row], dtype=np.int64)


class _Times(NamedTuple):
    seconds: Floats
    again_s: Floats

    @classmethod
    def of(
        cls, problem: Problem, names: Sequence[str], layers: Sequence[Sequence[Layer]]
    ) -> _Times:
        job, kinds = problem.job, problem.cluster.device_types
        shape = len(names), len(layers[0])
        seconds, again_s = np.zeros((*shape, len(KINDS))), np.zeros(shape)
        for k, (name, rows) in enumerate(zip(names, layers, strict=True)):
            if job.precision not in kinds[name].precisions and not all(r.measured for r in rows):
                continue  # A type that no device has, which nothing asks for.
            for n, row in enumerate(rows):
                times = layer_times(row, name, kinds[name], job.precision)
                seconds[k, n] = [times.seconds(kind) for kind in KINDS]
                again_s[k, n] = loaded_times(row, name, kinds[name], job.precision).forward_s
        return cls(seconds, again_s)


class _Tensors(NamedTuple):
    producer: Ints
    last_user: Ints
    saver: Ints
    made_start: Ints
    made: Ints
    kept_start: Ints
    kept: Ints
    user_start: Ints
    user: Ints

    @classmethod
    def of(cls, graph: LayerGraph) -> _Tensors:
        place = {name: n for n, name in enumerate(graph.layers)}
        made: list[list[int]] = [[] for _ in place]
        kept: list[list[int]] = [[] for _ in place]
        producer, saver, users = [], [], []
        for n, row in enumerate(graph.record.boundaries):
            producer.append(place[row.producer])
            saver.append(-1 if row.saved_by is None else place[row.saved_by])
            users.append([place[name] for name in row.users])
            made[producer[-1]].append(n)
            if saver[-1] >= 0:
                kept[saver[-1]].append(n)
        last = [max(row) for row in users]
        ends = (np.array(producer, np.int64), np.array(last, np.int64), np.array(saver, np.int64))
        return cls(*ends, *_rows(made), *_rows(kept), *_rows(users))


class _Parameters(NamedTuple):
    held_start: Ints
    held: Ints
    held_before: Ints
    static: Ints
    traffic: Floats
    summed: Ints
    gradient: Ints
    users: Ints

    @classmethod
    def of(cls, problem: Problem, graphs: Sequence[LayerGraph]) -> _Parameters:
        numbers = {row.name: n for n, row in enumerate(problem.graph.record.parameters)}
        held, before, last = [], [], dict.fromkeys(numbers, -1)
        users = np.zeros(len(numbers), dtype=np.int64)
        for n, layer in enumerate(problem.graph.record.layers):
            names = list(dict.fromkeys(layer.parameters))
            held.append([numbers[name] for name in names])
            before += [last[name] for name in names]
            last.update(dict.fromkeys(names, n))
            users[held[-1]] += 1
        rows = [[graph.parameters[name] for name in numbers] for graph in graphs]
        made = _of_trainable(rows, partial(gradient_bytes, problem.job))
        return cls(
            *_rows(held),
            np.array(before, dtype=np.int64),
            np.array([_static(problem, of_type) for of_type in rows]),
            _of_trainable(rows, partial(step_traffic_bytes, problem.job)).astype(float),
            np.where([[p.summed for p in row] for row in rows], made, 0),
            made,
            users,
        )


def _static(problem: Problem, parameters: Sequence[Parameter]) -> list[list[int]]:
    """Return the bytes of each parameter, by how many devices share its optimizer state."""
    most = len(problem.cluster.devices) * problem.copies if problem.job.shards_state else 1
    known: dict[object, int] = {}

    def bytes_of(row: Parameter, holders: int) -> int:
        divided = row.name in problem.divided_parameters
        key = row.bytes, row.elements, row.trainable, divided, holders
        if key not in known:
            known[key] = static_bytes(problem, [row], holders)
        return known[key]

    return [[bytes_of(row, holders) for row in parameters] for holders in range(1, most + 1)]


def _of_trainable(rows: Sequence[Sequence[Parameter]], figure: Callable[[Parameter], int]) -> Ints:
    found = [[figure(p) if p.trainable else 0 for p in row] for row in rows]
    return np.array(found, dtype=np.int64).reshape(len(rows), -1)


class _Cuts(NamedTuple):
    """Bytes before each layer and after the last one, as a type has them."""

    crossing: Ints
    crossing_gradient: Ints
    sent: Ints
    returned: Ints
    gathered: Ints
    returned_gathered: Ints

    @classmethod
    def of(cls, graph: LayerGraph) -> _Cuts:
        place = {name: n for n, name in enumerate(graph.layers)}
        sums = np.zeros((len(cls._fields), len(place) + 1), dtype=np.int64)
        for row in graph.record.boundaries:
            alive = slice(place[row.producer] + 1, max(place[user] for user in row.users) + 1)
            moved = row.message_bytes
            parts = moved if row.parts > 1 else 0
            back = row.requires_grad
            added = [row.bytes, back * row.bytes, moved, back * moved, parts, back * parts]
            sums[:, alive] += np.array(added)[:, None]
        return cls(*sums)
