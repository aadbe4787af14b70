"""Placed stages, written into the tables of :mod:`planner.program.stage_rows`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import PipeplanError
from planner.program.compiled import Block
from planner.program.program import KINDS
from planner.program.stage_rows import (
    AHEAD_S,
    DEVICE,
    LENGTH_OF,
    MAKER,
    MOST_BYTES,
    RECEIVED_BYTES,
    RECEIVED_S,
    REDUCTION,
    REDUCTION_DEVICE,
    REDUCTION_LINK,
    REPLICA,
    SECONDS,
    STAGE,
    rows_for,
    set_rules,
)

Pairs = Sequence[tuple[int, str]]
"""The replicas of all stages: numbers of stages, names of devices."""


def stage_rows(
    placed: PlacedPipeline,
    by_length: Sequence[PlacedPipeline] = (),
    length_of: Sequence[int] = (),
) -> Block:
    """Return the tables of placed stages.

    Args:
        placed: the stages.
        by_length: the same stages with the times and messages of each length of microbatches.
        length_of: which of these each microbatch has.

    Raises:
        PipeplanError: if neighbouring stages have no path.
    """
    classes, syncs = tuple(by_length) or (placed,), placed.synchronisations
    pairs = [(s, name) for s, row in enumerate(placed.stages) for name in row.spec.devices]
    counts = {
        "stages": len(placed.stages),
        "replicas": len(pairs),
        "devices": len(placed.devices),
        "microbatches": placed.microbatches,
        "classes": len(classes),
        "reductions": len(syncs),
    }
    members, makers = sum(len(row.devices) for row in syncs), sum(len(row.ahead) for row in syncs)
    sizes = (*counts.values(), members, sum(len(row.load.links) for row in syncs), makers)
    found = rows_for(*sizes)
    for name, count in {**counts, "makers": makers}.items():
        found.numbers[name] = count
    set_rules(found, placed.behaviour)
    _fill_stages(found, placed, pairs)
    _fill_reductions(found, placed, pairs)
    numbers = range(len(placed.stages))
    found[SECONDS][:] = np.ravel([_seconds(row, pairs) for row in classes])
    found[RECEIVED_BYTES][:] = [
        row.received(stage, kind)[0] for row in classes for stage, kind in product(numbers, "BF")
    ]
    found[RECEIVED_S][:] = [
        row.received_s(stage, kind, name)
        for row in classes
        for (stage, name), kind in product(pairs, "BF")
    ]
    found[LENGTH_OF][:] = list(length_of) or 0
    found[AHEAD_S][:] = [
        seconds
        for row in classes
        for sync, timed in zip(syncs, row.synchronisations, strict=True)
        for pair in sync.ahead
        for seconds in timed.ahead[pair]
    ]
    return found


def _seconds(placed: PlacedPipeline, pairs: Pairs) -> list[list[float]]:
    times = [placed.stages[stage].times[name] for stage, name in pairs]
    return [[row.seconds(kind) for kind in KINDS] for row in times]


def _fill_stages(rows: Block, placed: PlacedPipeline, pairs: Pairs) -> None:
    cluster, first = placed.problem.cluster, 0
    places = {name: number for number, name in enumerate(placed.devices)}
    for row, stage in zip(rows[STAGE], placed.stages, strict=True):
        count = len(stage.spec.devices)
        for field in rows[STAGE].dtype.names or ():
            if field.endswith("_bytes"):
                row[field] = min(getattr(stage, field), MOST_BYTES)
        row["first"], row["last"] = first, first + count
        row["is_together"] = bool(stage.collective_s) and count > 1
        first += count
    for row, (number, name) in zip(rows[REPLICA], pairs, strict=True):
        row["stage"], row["device"] = number, places[name]
        row["split_extra_bytes"] = placed.split_extra_bytes(number, name)
        row["copy_s"] = _copy_s(placed, name, placed.stages[number].offload_bytes)
    for row, name in zip(rows[DEVICE], placed.devices, strict=True):
        row["number"], row["optimizer_s"] = cluster.numbers[name], placed.optimizer_s[name]
        row["static_bytes"] = min(placed.static_bytes(name), MOST_BYTES)
        row["capacity_bytes"] = min(placed.capacity_bytes(name), MOST_BYTES)


def _copy_s(placed: PlacedPipeline, device: str, bytes_: int) -> float:
    """Return the seconds in which bytes are copied over a device's host link, either way.

    Raises:
        PipeplanError: if its type has none.
    """
    kind = placed.problem.cluster.device_type(device)
    if not bytes_:
        return 0.0
    if kind.host_link_gb_per_s is None:
        raise PipeplanError(
            f"device_types.{placed.problem.cluster.type_of(device)}.host_link_gb_per_s: null, but "
            f"a stage on {device!r} offloads its stash; set it (`pipeplan detect` measures it) or "
            "keep the stash"
        )
    return bytes_ / (kind.host_link_gb_per_s * 1e9)


def _fill_reductions(rows: Block, placed: PlacedPipeline, pairs: Pairs) -> None:
    places = {name: number for number, name in enumerate(placed.devices)}
    replicas = {pair: number for number, pair in enumerate(pairs)}
    syncs = placed.synchronisations
    for name, table, found in (
        ("device", REDUCTION_DEVICE, [[places[name] for name in row.devices] for row in syncs]),
        ("link", REDUCTION_LINK, [row.load.links for row in syncs]),
        ("maker", MAKER, [[replicas[pair] for pair in row.ahead] for row in syncs]),
    ):
        ends = np.cumsum([0, *map(len, found)])
        rows[REDUCTION][f"first_{name}"], rows[REDUCTION][f"last_{name}"] = ends[:-1], ends[1:]
        rows[table][:] = [number for row in found for number in row]
    for row, sync in zip(rows[REDUCTION], syncs, strict=True):
        row["seconds"], row["gathers"], row["gather_s"] = sync.seconds, sync.gathers, sync.gather_s
        row["bytes"], row["gathered_bytes"] = sync.bytes, sync.gathered_bytes
        row["latency_s"], row["gb_per_s"], row["gather_latency_s"], _ = sync.load
