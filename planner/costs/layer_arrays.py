"""The arrays of a stage table: figures of layers, in the order in which stages cut them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs.by_identity import by_identity
from planner.costs.gradients import gradient_bytes
from planner.costs.optimizer import static_bytes, step_traffic_bytes
from planner.costs.roofline import KINDS, layer_times, loaded_times
from planner.model.blocks import block_name
from planner.model.graph_record import Layer, Parameter
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CUTS = ("crossing", "crossing_gradient", "sent", "returned", "gathered", "returned_gathered")


@by_identity
def layer_arrays(problem: Problem, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Return the arrays of layers in some order, without ranks and static bytes."""
    types, place = list(problem.cluster.device_types), {name: n for n, name in enumerate(names)}
    graphs = [problem.graph.on(kind) for kind in types]
    layers = [[graph.layers[name] for name in names] for graph in graphs]
    seconds, again_s = _times(problem, types, layers)
    saved_input = np.array([[graph.saved_input_bytes[name] for name in names] for graph in graphs])
    peak = np.array([[graph.peak_bytes[name] for name in names] for graph in graphs])
    divided = _divided(problem, names)
    tensors = [[row.bytes for row in graph.record.boundaries] for graph in graphs]
    may_run = [[r.may_run_on(n) for r in row] for n, row in zip(types, layers, strict=True)]
    cuts = np.stack([_cuts(graph, place) for graph in graphs], axis=1)
    return {
        "seconds": seconds,
        "again_s": again_s,
        "may_run": np.array(may_run),
        "stash": _by_type(layers, lambda row: row.stash_bytes),
        "weight_stash": _by_type(layers, lambda row: row.kept_for_weights_bytes),
        "peak": peak,
        "saved_input": saved_input,
        "host_stash": _by_type(layers, lambda row: max(0, row.stash_bytes - row.batch_bytes)),
        "block": _blocks(names),
        "divided_weights": divided[:, 0],
        "divided_gradients": divided[:, 1],
        "tensor_bytes": np.array(tensors).reshape(len(graphs), -1),
        **_tensors(problem.graph, place),
        **_parameters(problem, graphs, layers[0]),
        **dict(zip(CUTS, cuts, strict=True)),
    }


def static_arrays(problem: Problem) -> Ints:
    """Return the static bytes of parameters by type and number of holders."""
    graphs = [problem.graph.on(name) for name in problem.cluster.device_types]
    names = [row.name for row in problem.graph.record.parameters]
    rows = [[graph.parameters[name] for name in names] for graph in graphs]
    return np.array([_static(problem, of_type) for of_type in rows])


def _divided(problem: Problem, names: Sequence[str]) -> Ints:
    """Return the bytes of each layer's weights that replicas divide, and of their gradients."""
    own = problem.graph.own_parameters if problem.job.shards_parameters else {}
    rows = [own.get(name, ()) for name in names]
    made = partial(gradient_bytes, problem.job)
    return np.array([(sum(p.bytes for p in row), sum(map(made, row))) for row in rows], np.int64)


def _by_type(layers: Sequence[Sequence[Layer]], figure: Callable[[Layer], int]) -> Ints:
    return np.array([[figure(row) for row in of_type] for of_type in layers], dtype=np.int64)


def _blocks(layers: Sequence[str]) -> Ints:
    number: dict[str, int] = {}
    names = map(block_name, layers)
    return np.array(
        [-1 if name is None else number.setdefault(name, len(number)) for name in names]
    )


def _rows(name: str, rows: Sequence[Sequence[int]]) -> dict[str, Ints]:
    """Return where each row begins, and all rows one after the other."""
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return {f"{name}_start": starts, name: np.array([x for row in rows for x in row], np.int64)}


def _times(
    problem: Problem, names: Sequence[str], layers: Sequence[Sequence[Layer]]
) -> tuple[Floats, Floats]:
    """Return the seconds of each layer's operations by type, and what recomputing it adds."""
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
    return seconds, again_s


def _tensors(graph: LayerGraph, place: Mapping[str, int]) -> dict[str, Ints]:
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
    last_user = [max(row) for row in users]
    found = {"producer": producer, "last_user": last_user, "saver": saver}
    return {
        **{name: np.array(row, np.int64) for name, row in found.items()},
        **_rows("made", made),
        **_rows("kept", kept),
        **_rows("user", users),
    }


def _parameters(
    problem: Problem, graphs: Sequence[LayerGraph], layers: Sequence[Layer]
) -> dict[str, NDArray[Any]]:
    numbers = {row.name: n for n, row in enumerate(problem.graph.record.parameters)}
    held, before, last = [], [], dict.fromkeys(numbers, -1)
    users = np.zeros(len(numbers), dtype=np.int64)
    for n, layer in enumerate(layers):
        names = list(dict.fromkeys(layer.parameters))
        held.append([numbers[name] for name in names])
        before += [last[name] for name in names]
        last.update(dict.fromkeys(names, n))
        users[held[-1]] += 1
    rows = [[graph.parameters[name] for name in numbers] for graph in graphs]
    made = _of_trainable(rows, partial(gradient_bytes, problem.job))
    return {
        **_rows("held", held),
        "held_before": np.array(before, dtype=np.int64),
        "traffic": _of_trainable(rows, partial(step_traffic_bytes, problem.job)).astype(float),
        "summed": np.where([[p.summed for p in row] for row in rows], made, 0),
        "gradient": made,
        "users": users,
    }


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


def _cuts(graph: LayerGraph, place: Mapping[str, int]) -> Ints:
    """Return the bytes before each layer and after the last: the last six arrays of the table."""
    sums = np.zeros((6, len(place) + 1), dtype=np.int64)
    for row in graph.record.boundaries:
        alive = slice(place[row.producer] + 1, max(place[user] for user in row.users) + 1)
        moved = row.message_bytes
        parts = moved if row.parts > 1 else 0
        back = row.requires_grad
        added = [row.bytes, back * row.bytes, moved, back * moved, parts, back * parts]
        sums[:, alive] += np.array(added)[:, None]
    return sums
