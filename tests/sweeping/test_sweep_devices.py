"""Which devices a point of fewer devices gets."""

from itertools import combinations

import pytest
from builders import boundary, cluster, device_type, graph, layer, link, parameter
from small_sweeps import JOB, QUICK, chain, ring
from transformers_by_hand import problem as of_transformer
from transformers_by_hand import transformer

from planner.analysis.sweep.devices import device_choices
from planner.analysis.sweep.engines import Limits, Task, solved
from planner.analysis.sweep.points import Point
from planner.cluster.cluster import Cluster
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.search.solve import solve
from planner.variants.problems import restricted_to

LIMITS = Limits(seed=0, **QUICK)
TYPES = {
    "slow": device_type(),
    "fast": device_type(peak_tflop_per_s={"float32": 2}, memory_gib=64),
    "large": device_type(memory_gib=4096, peak_tflop_per_s={"float32": 0.5}),
}


def islands() -> Cluster:
    """Two slow devices joined well, two fast ones far from each other, a large one."""
    devices = {"s0": "slow", "f0": "fast", "s1": "slow", "f1": "fast", "l0": "large"}
    links = [link(name, "hub", 1e-6) for name in devices]
    return cluster(devices, [*links, link("s0", "s1", 100)], ["hub"], TYPES)


def problem(the_cluster: Cluster, bytes_: int = 1) -> Problem:
    rows = [layer(f"l{i}") for i in range(4)]
    cuts = [boundary(f"l{i}", f"l{i + 1}", bytes_=bytes_) for i in range(3)]
    return Problem(graph(rows, cuts), the_cluster, JOB)


def heavy(gib: int) -> Problem:
    """A layer whose weights and gradients take so much, whatever is recomputed."""
    weights = parameter("w", elements=gib * 2**30 // 8)
    return Problem(graph([layer("a", parameters=["w"])], [], [weights]), islands(), JOB)


def planned(task: Task) -> Plan:
    plan = solved(task, 1)[1]
    assert isinstance(plan, Plan), plan
    return plan


def test_sets_grow_by_links_by_speed_and_by_memory() -> None:
    sets = set(device_choices(problem(islands()), 2))
    assert ("s0", "s1") in sets
    assert ("f0", "f1") in sets
    assert any("l0" in names for names in sets)
    assert all(len(names) == 2 for names in sets)


def test_equal_devices_give_one_choice_the_first_in_the_file() -> None:
    assert device_choices(problem(ring(6)), 3) == (("d0", "d1", "d2"),)
    assert device_choices(problem(ring(6)), 6) == (ring(6).device_names,)


def test_a_part_of_a_cluster_keeps_the_routes_among_its_devices() -> None:
    whole = islands()
    part = restricted_to(problem(whole), ("s0", "s1", "f1")).cluster
    assert part.device_names == ("s0", "s1", "f1")
    for first, second in combinations(part.device_names, 2):
        old, new = whole.route(first, second), part.route(first, second)
        assert old is not None
        assert new is not None
        assert (old.bandwidth_gb_per_s, old.latency_s) == (new.bandwidth_gb_per_s, new.latency_s)
    # It is still a cluster that a file can hold.
    assert Cluster.from_data(part.model_dump(mode="json")) == part


@pytest.mark.extensive
@pytest.mark.parametrize("bytes_", [1, 10**7])
def test_the_devices_chosen_are_the_best_of_all_sets(bytes_: int) -> None:
    """With small tensors the fast devices win, with large ones those that are joined well."""
    whole = problem(islands(), bytes_)
    best_s = min(
        solve(restricted_to(whole, names), deterministic=True).iteration_time_s
        for names in combinations(whole.cluster.device_names, 2)
    )
    found = planned(Task(Point("islands", 2, 1, 2), whole, LIMITS))
    assert found.predicted.iteration_time_s == pytest.approx(best_s)


def test_a_choice_without_memory_gives_way_to_one_that_has_it() -> None:
    """Only the large device, the slowest, holds the layer."""
    whole = heavy(2000)
    found = planned(Task(Point("islands", 1, 1, 2), whole, LIMITS))
    assert found.cluster.device_names == ("l0",)


def test_where_no_choice_fits_the_reason_is_that_of_the_largest_memory() -> None:
    whole = heavy(9000)
    _, reason = solved(Task(Point("islands", 1, 1, 2), whole, LIMITS), 1)
    assert isinstance(reason, str)
    assert "4 TiB" in reason


def test_devices_that_may_not_run_a_layer_are_no_choice() -> None:
    rows = [layer("a", device_types=["slow"]), layer("b")]
    whole = Problem(graph(rows), islands(), JOB)
    found = planned(Task(Point("islands", 1, 1, 2), whole, LIMITS))
    assert found.cluster.device_names in (("s0",), ("s1",))


def test_more_devices_than_there_are_is_a_reason() -> None:
    task = Task(Point("ring", 9, 1, 2), Problem(chain(), ring(3), JOB), LIMITS)
    assert solved(task, 1)[1] == "the cluster has only 3 devices"


def test_devices_that_form_no_group_are_no_choice() -> None:
    """The fastest and the best joined device are of two types; groups need two of one type."""
    kinds = dict(
        zip(["a", "b", "c", "d", "e"], ["fast", "slow", "slow", "fast", "slow"], strict=True)
    )
    links = [link(name, "hub", 1e-3 if name == "d" else 100) for name in kinds]
    mixed = cluster(kinds, links, ["hub"], TYPES)
    whole = of_transformer(transformer(2, degrees=(2,)), mixed, tensor_parallel=2)
    assert ("a", "b") in device_choices(whole, 2)
    found = planned(Task(Point("mixed", 2, 1, 2), whole, LIMITS))
    assert len({kinds[name] for name in found.rank_devices}) == 1
    assert (found.degree, len(found.rank_devices)) == (2, 2)
