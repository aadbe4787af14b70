"""Reductions of placed stages take what their bytes take alone among their devices."""

from hypothesis import given
from hypothesis import strategies as st
from strategies import SYNCS, partitions, problems

from planner.costs.collectives import all_reduce_s, ring_half_s
from planner.costs.placement import place
from planner.plan.plan import Sync


@given(st.data(), SYNCS)
def test_seconds_are_those_of_a_collective_alone(data: st.DataObject, sync: Sync) -> None:
    problem = data.draw(problems(min_devices=2, shards=True))
    specs = data.draw(partitions(problem))
    placed = place(problem, specs, Sync() if problem.job.shards_state else sync)
    for row in placed.synchronisations:
        alone_s = ring_half_s if row.gathers else all_reduce_s
        assert row.seconds == alone_s(problem.cluster, row.devices, row.bytes)
        gather_s = ring_half_s(problem.cluster, row.devices, row.gathered_bytes)
        assert row.gather_s == (gather_s if row.gathers else 0)
    for number, spec in enumerate(specs):
        buckets = [row for row in placed.synchronisations if row.stages == (number,)]
        assert [row.bucket for row in buckets] == list(range(len(buckets)))
        assert all({*row.devices} == {*spec.devices} for row in buckets)
