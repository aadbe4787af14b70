"""Transfers over a cluster's links: times worked out by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_worlds import COMPUTE_S, run_of

from benchmarks.sync.uniform import uniform_world
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.simulation.fair_rates import fair_rates
from planner.sync.simulation.comparison import compare_syncs
from planner.sync.simulation.links import WorkerFlow, WorkerLinks, flow_over, ring
from planner.sync.simulation.rounds import buckets_of
from planner.sync.simulation.run import Scenario
from planner.sync.simulation.transfers import WorkerTransfers
from planner.sync.simulation.world import LayerParameters, LinkCost, World
from planner.sync.strategies import parse_sync

BYTES = 10_000_000
"""10 ms over a link of a device, 100 ms over that between the nodes."""
WITHIN_S, BETWEEN_S = 0.01, 0.1


def flow_of(links: tuple[int, ...], most: float, bytes_: float) -> WorkerFlow:
    return flow_over(((links, most),), bytes_, 0.0)


def ends_s(transfers: WorkerTransfers, requests: Sequence[tuple[float, WorkerFlow]]) -> list[float]:
    """Return when flows end that begin at these times on idle links."""
    ends = [0.0] * len(requests)
    coming = sorted((begin_s + flow.fixed_s, n) for n, (begin_s, flow) in enumerate(requests))[::-1]
    while coming or transfers.next_end_s < math.inf:
        if coming and coming[-1][0] <= transfers.next_end_s:
            begin_s, number = coming.pop()
            transfers.begin(begin_s, requests[number][1], number)
            continue
        now_s = transfers.next_end_s
        for number in transfers.ended(now_s):
            ends[number] = now_s
    return ends


def two_nodes() -> Cluster:
    """Two nodes of two devices; 1 GB/s to a node's switch, 0.1 GB/s between the switches."""
    devices = [f"n{node}/d{device}" for node in (0, 1) for device in (0, 1)]
    links = [(device, f"{device[:2]}/switch", 1.0) for device in devices]
    links.append(("n0/switch", "n1/switch", 0.1))
    unit = {
        "memory_gib": 8,
        "memory_bandwidth_gb_per_s": 1,
        "peak_tflop_per_s": {"float32": 1},
        "efficiency": 1,
    }
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "two nodes",
            "device_types": {"unit": unit},
            "devices": [{"name": name, "type": "unit"} for name in devices],
            "switches": ["n0/switch", "n1/switch"],
            "links": [
                {"between": [a, b], "bandwidth_gb_per_s": rate, "latency_us": 0}
                for a, b, rate in links
            ],
        }
    )


def linked_world(**fields: object) -> World:
    cluster = two_nodes()
    flat = uniform_world(4, COMPUTE_S, BYTES, LinkCost(0.0, 1.0), pipelines_per_node=2)
    links = WorkerLinks(cluster, (cluster.device_names,))
    world = replace(flat, between=LinkCost(0.0, 0.1), links=links, scheduler_round_trip_s=0.0)
    return replace(world, **fields)


def test_flows_share_a_link_and_leave_the_rest_to_others() -> None:
    """Of 1 GB/s two take half each; one that another link narrows leaves more to the others."""
    wide, narrow = 0, 1
    transfers = WorkerTransfers(np.array([1.0, 0.2]))
    half = (0.0, flow_of((wide,), 1.0, 1e9))
    assert ends_s(transfers, [half, half]) == pytest.approx([2.0, 2.0])
    # 0.2 and 0.8 until 1.25 s; then 0.2 goes on by itself.
    narrowed = (0.0, flow_of((wide, narrow), 0.2, 1e9))
    assert ends_s(transfers, [half, narrowed]) == pytest.approx([1.25, 5.0])
    # By itself until 1 s.
    late = (1.5, flow_of((wide,), 1.0, 1e9))
    assert ends_s(transfers, [half, late]) == pytest.approx([1.0, 2.5])


def test_rings_over_wide_cards_do_not_slow_each_other() -> None:
    """Cards of 10 GB/s, for eight devices of 1 GB/s each: more than a thousand rings are free."""
    links = replace(
        uniform_world(1024, COMPUTE_S, BYTES, LinkCost(0.0, 10.0)), pipelines_per_node=8
    )
    world = replace(links, within=LinkCost(0.0, 1.0))
    transfers = WorkerTransfers(world.routes.capacity_gb_per_s)
    groups = [(n, n + 341, n + 682) for n in range(341)]
    requests = [(n / 1000, world.all_reduce(members, BYTES)) for n, members in enumerate(groups)]
    found = ends_s(transfers, requests)
    assert found == pytest.approx([n / 1000 + 4 / 3 * WITHIN_S for n in range(len(groups))])


def test_flows_to_one_server_keep_its_link_busy() -> None:
    """Each of a thousand begins and ends by itself."""
    world = uniform_world(1000, COMPUTE_S, BYTES, LinkCost(0.0, 1.0))
    transfers = WorkerTransfers(world.routes.capacity_gb_per_s)
    requests = [
        (worker / 10_000, world.server_messages(worker, 1, 0, is_push=True)[0])
        for worker in range(1, 1000)
    ]
    # All of the server's link from first to last.
    assert max(ends_s(transfers, requests)) == pytest.approx(1e-4 + 999 * WITHIN_S)


def test_a_ring_crosses_each_link_as_often_as_its_members_do() -> None:
    links = linked_world().links
    assert links is not None
    neighbours = flow_over(ring(links, (0, 1, 2, 3), 0), BYTES, 0.0)
    between = 3 * (len(links.cluster.links) - 1)
    # Of its three numbers, for each direction and both, the directions'.
    assert sorted(link for link in neighbours.links if link >= between) == [between, between + 2]
    ends = ends_s(WorkerTransfers(links.capacity_gb_per_s), [(0.0, neighbours)])
    assert ends == pytest.approx([BETWEEN_S])
    # In the order 0, 2, 1, 3 every hop crosses the link, two in each direction.
    zigzag = flow_over(ring(links, (0, 2, 1, 3), 0), BYTES, 0.0)
    ends = ends_s(WorkerTransfers(links.capacity_gb_per_s), [(0.0, zigzag)])
    assert ends == pytest.approx([2 * BETWEEN_S])


def test_members_behind_fast_hops_are_done_before_the_ring_is() -> None:
    """Two on one node, one on the other: parts of h over the slow hops, of h / 10 within.

    ===== ============ ============= ============
    step  first         second        third
    ===== ============ ============= ============
    1     h             h / 10        h
    2     2 h           h + h / 10    2 h
    3     3 h           2 h + h / 10  3 h
    4     4 h           3 h + h / 10  4 h
    ===== ============ ============= ============
    """
    world = linked_world()
    (early, first), (late, rest) = world.group_all_reduce((0, 1, 2), 0)
    assert (first, rest) == ((1,), (0, 2))
    assert early.bytes == pytest.approx(3.1 / 4 * (early.bytes + late.bytes))
    assert early.bytes + late.bytes == pytest.approx(4 / 3 * BYTES)
    ((_, members),) = world.group_all_reduce((0, 2), 0)
    assert members == (0, 2)


def _links(flow: WorkerFlow) -> tuple[tuple[int, int], ...]:
    return tuple((int(link), 1) for link in flow.links)


def _ends_one_by_one(
    capacity: dict[tuple[int, int], float], flows: list[tuple[float, WorkerFlow]]
) -> list[float]:
    """Work out all rates anew at each begin and end."""
    ends, left, now_s = [0.0] * len(flows), [flow.bytes / 1e9 for _, flow in flows], 0.0
    coming = sorted(range(len(flows)), key=lambda n: flows[n][0])
    moving: list[int] = []
    while coming or moving:
        rates = fair_rates(
            [(_links(flows[n][1]), flows[n][1].most_gb_per_s) for n in moving], capacity
        )
        next_end_s = min(
            [left[n] / r for n, r in zip(moving, rates, strict=True)], default=math.inf
        )
        begin_s = flows[coming[0]][0] if coming else math.inf
        step_s = min(next_end_s, begin_s - now_s)
        now_s += step_s
        for number, rate in zip(moving, rates, strict=True):
            left[number] -= rate * step_s
        if step_s < next_end_s:
            moving.append(coming.pop(0))
        for number in [n for n in moving if left[n] <= 1e-9]:
            ends[number] = now_s
            moving.remove(number)
    return ends


LINKS = {(number, 1): rate for number, rate in enumerate((1.0, 0.5, 0.25, 2.0))}


@given(
    st.lists(
        st.tuples(
            st.floats(0, 2),
            st.lists(st.integers(0, len(LINKS) - 1), min_size=1, max_size=4),
            st.floats(0.1, 3),
            st.floats(1e7, 1e9),
        ),
        min_size=1,
        max_size=7,
    )
)
def test_flows_end_as_if_all_rates_were_worked_out_at_each_change(
    rows: list[tuple[float, list[int], float, float]],
) -> None:
    flows = [(begin_s, flow_of(tuple(ls), most, size)) for begin_s, ls, most, size in rows]
    found = ends_s(WorkerTransfers(np.array(list(LINKS.values()))), flows)
    assert found == pytest.approx(_ends_one_by_one(LINKS, flows), rel=1e-6, abs=1e-6)


def test_devices_without_links_between_them_are_named() -> None:
    world = linked_world()
    assert world.links is not None
    apart = world.links.cluster.model_copy(update={"links": world.links.cluster.links[:-1]})
    links = WorkerLinks(apart, world.links.devices)
    with pytest.raises(PipeplanError, match="no links join 'n0/d1' and 'n1/d0'"):
        run_of("all_reduce", replace(world, links=links))


def test_an_all_reduce_takes_its_narrowest_link() -> None:
    found = run_of("all_reduce:overlap=false,bucket_mib=1000", linked_world()).iterations_per_s
    assert found == pytest.approx(4 / (COMPUTE_S + 6 / 4 * BETWEEN_S))


def test_workers_beside_the_server_reach_it_locally() -> None:
    """Gradients of the other node share the link between, those of the server's node do not."""
    found = run_of("parameter_server", linked_world(), iterations=100).iterations_per_s
    assert found == pytest.approx(4 / (COMPUTE_S + 2 * 2 * BETWEEN_S), rel=0.01)
    done = run_of("parameter_server:mode=async", linked_world(), iterations=100).done
    beside_s = COMPUTE_S + 2 * WITHIN_S
    assert done[0] / done[1] == pytest.approx(beside_s / COMPUTE_S, rel=0.02)
    # Two that push and pull at the same time have half of the link each way.
    assert done[1] / done[2] == pytest.approx((COMPUTE_S + 4 * BETWEEN_S) / beside_s, rel=0.05)


def test_an_exchange_is_answered_once_it_has_arrived() -> None:
    """A pair on two nodes moves its weights there and back; the others wait for nobody."""
    cluster = two_nodes()
    links = WorkerLinks(cluster, (("n0/d0", "n1/d0"),))
    world = linked_world(workers=2, pipelines_per_node=1, links=links)
    found = run_of("ad_psgd", world, iterations=100)
    # The one that asks waits for both messages; the one that answers computes.
    assert found.done[1] / found.done[0] == pytest.approx(2 * BETWEEN_S / COMPUTE_S, rel=0.02)


def test_buckets_hold_the_gradients_of_real_layers() -> None:
    rank = linked_world().ranks[0]
    mib = 2**20
    layers = (
        LayerParameters(mib // 2, 0.05, 0.04),
        LayerParameters(mib // 2, 0.06, 0.03),
        LayerParameters(3 * mib, 0.08, 0.02),
        LayerParameters(mib // 4, 0.10, 0.0),
    )
    found = buckets_of(replace(rank, layers=layers, parameter_bytes=17 * mib // 4), 1.0)
    rows = [(bucket.bytes / mib, bucket.complete_s, bucket.needed_s) for bucket in found]
    assert rows == [(1.0, 0.06, 0.03), (3.0, 0.08, 0.02), (0.25, 0.10, 0.0)]
    assert [bucket.optimizer_share for bucket in found] == pytest.approx([1, 13 / 17, 1 / 17])


def test_jitter_makes_all_wait_for_the_last() -> None:
    """The largest of four draws is 1.03 standard deviations late, on average."""
    world = linked_world(jitter_s=0.01)
    found = run_of("all_reduce:overlap=false", world, iterations=400).iterations_per_s
    assert 4 / found == pytest.approx(COMPUTE_S + 6 / 4 * BETWEEN_S + 0.0103, rel=0.01)


def test_a_worker_that_leaves_is_not_waited_for_on_links() -> None:
    for strategy in ("all_reduce", "parameter_server:mode=async", "eager_parameter_server"):
        run = run_of(strategy, linked_world(), "fault:3:1", iterations=60)
        assert run.done[3] < 15
        assert min(run.done[:3]) > 20
    lone = run_of("all_reduce", linked_world(), "fault:1:0+fault:2:0+fault:3:0")
    assert lone.iterations_per_s == pytest.approx(1 / COMPUTE_S)


def test_results_do_not_depend_on_the_number_of_processes() -> None:
    scenario = Scenario(linked_world(jitter_s=0.005), 12)
    syncs = [parse_sync("ad_psgd"), parse_sync("semi_decentralized:overlap=true")]
    assert compare_syncs(scenario, syncs, jobs=2) == compare_syncs(scenario, syncs)
