"""Reductions that compiled code makes for stages, beside those of planner.costs.reductions."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import SYNCS, partitions, problems

from planner.costs.network_table import NetworkTable
from planner.costs.placement import is_connected, place
from planner.costs.stage_table import StageTable
from planner.plan.plan import Sync, overlapped_bucket_bytes
from planner.plan.runtime_rules import RuntimeRules
from planner.program.compiled import Block, entry, pointer
from planner.program.lower.gradient_tables import gradient_rows, gradient_tables
from planner.program.lower.gradients import fill_gradients
from planner.program.lower.wires import wires_of
from planner.program.stage_rows import (
    AHEAD_S,
    DEVICE,
    MAKER,
    REDUCTION,
    REDUCTION_DEVICE,
    REDUCTION_LINK,
    REPLICA,
    STAGE,
    stage_rows,
)


@entry
def fill_once(rows, gradients, wires):
    return fill_gradients(pointer(rows), pointer(gradients), pointer(wires))


@given(st.data(), st.sampled_from(["at_once", "in_turn"]), SYNCS)
def test_as_placed(data: st.DataObject, tied: str, sync: Sync) -> None:
    problem = data.draw(problems(min_devices=2, shards=True))
    problem = replace(problem, runtime=RuntimeRules(name="random", tied=tied))
    if problem.job.shards_state:
        sync = Sync()
    table, network = StageTable(problem), NetworkTable.of(problem.cluster)
    specs, first = [], 0
    limits = []
    for spec in data.draw(partitions(problem, recompute=False)):
        last, limit = first + len(spec.layers), data.draw(st.sampled_from([0, 0, 1, 2, 9]))
        specs.append(replace(spec, recompute=table.recomputed(first, last, limit)))
        limits.append((first, last, limit))
        first = last
    placed = place(problem, specs, sync)
    bucket = overlapped_bucket_bytes(problem.job, sync, placed.behaviour)
    expected, wires = stage_rows(placed, network), wires_of(network)
    gradients = gradient_tables(table, bucket, len(specs))
    rows = gradient_rows(table, gradients, wires, len(specs), len(expected[REPLICA]), 1)
    for number in (STAGE, REPLICA, DEVICE):
        rows[number][: len(expected[number])] = expected[number]
    for name in ("stages", "replicas", "devices"):
        rows.numbers[name] = expected.numbers[name]
    rows.numbers["classes"] = 1
    for row, limit in zip(rows[STAGE], limits, strict=True):
        row["begin"], row["end"], row["rerun"] = limit
    assert fill_once(rows.header, gradients.header, wires.header) == is_connected(placed)
    for name in ("reductions", "makers"):
        assert rows.numbers[name] == expected.numbers[name]
    for number in (REDUCTION, REDUCTION_DEVICE, REDUCTION_LINK):
        np.testing.assert_array_equal(rows[number][: len(expected[number])], expected[number])
    assert list(makers(rows)) == list(makers(expected))


def makers(rows: Block) -> Iterator[dict[int, tuple[float, float]]]:
    """Of each reduction, by replica, how early it has the gradients."""
    ahead_s = rows[AHEAD_S].reshape(-1, 2).tolist()
    for row in rows[REDUCTION][: rows.numbers["reductions"]]:
        places = range(row["first_maker"], row["last_maker"])
        yield {int(rows[MAKER][place]): tuple(ahead_s[place]) for place in places}
