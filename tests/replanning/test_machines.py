"""The machines after a change: what is lost, slower, added, and what is refused."""

from functools import cache
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trained import model, nodes, plan_of, two_nodes

from planner.cluster.cluster import Cluster
from planner.cluster.hardware import DeviceType
from planner.cluster.presets import DEVICES
from planner.costs.roofline import layer_times
from planner.errors import PipeplanError
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.tracing.trace import trace
from planner.variants.machine_changes import new_machines, parse_slow, slower


def changed(plan: Plan, **changes: object) -> Cluster:
    return new_machines(plan, **changes).problem.cluster


def ways(cluster: Cluster) -> dict[tuple[str, str], object]:
    """Type and routes of every pair of devices, by their names alone."""
    found: dict[tuple[str, str], object] = {}
    for first, second in permutations(cluster.device_names, 2):
        route = cluster.route(first, second)
        links = None if route is None else [cluster.link_name(x) for x in route.links]
        figures = None if route is None else (route.bandwidth_gb_per_s, route.latency_s)
        found[first, second] = (cluster.device_type(first), figures, links)
    return found


def test_all_other_routes_stay_without_a_lost_device() -> None:
    plan = two_nodes()
    left = changed(plan, lost=("n0/gpu1",))
    assert left.device_names == ("n0/gpu0", "n1/gpu0", "n1/gpu1")
    assert ways(left).items() <= ways(plan.cluster).items()


def test_a_lost_node_takes_its_devices_its_switch_and_its_links() -> None:
    left = changed(two_nodes(), lost=("n1",))
    assert left.device_names == ("n0/gpu0", "n0/gpu1")
    assert left.switches == ("n0", "network")
    assert all("n1" not in str(link.between) for link in left.links)


def test_what_survivors_hold_is_of_devices_that_were_never_lost() -> None:
    plan = two_nodes()
    machines = new_machines(plan, lost=("n1/gpu0",), added=("n1/gpu0=n1/gpu1",))
    assert set(machines.problem.cluster.device_names) == set(plan.cluster.device_names)
    assert machines.survivors == {"n0/gpu0", "n0/gpu1", "n1/gpu1"}


def test_twins_of_a_device_and_of_a_node_have_its_links() -> None:
    found = changed(two_nodes(), added=("n0/gpu2=n0/gpu0", "n1/gpu2=n1/gpu1"))
    assert ways(found) == ways(nodes(3, 3))
    found = changed(two_nodes(), added=("n2=n1",))
    assert ways(found) == ways(nodes(2, 2, 2))
    assert "n2" in found.switches


def test_a_successor_of_what_was_lost_is_like_it() -> None:
    before = two_nodes()
    for name in ("n1", "n1/gpu0"):
        again = changed(before, lost=(name,), added=(f"{name}={name}",))
        assert ways(again) == ways(before.cluster)
    # Devices of a lost node are named one by one, and its switch is still there.
    names = ("n1/gpu0", "n1/gpu1")
    again = changed(before, lost=names, added=tuple(f"{name}={name}" for name in names))
    assert ways(again) == ways(before.cluster)
    renamed = changed(before, lost=("n1",), added=("n9=n1",))
    assert "n9/gpu0" in renamed.device_names
    assert "n1/gpu0" not in renamed.device_names
    assert "n1" not in renamed.switches
    new, old = (
        c.route(f"{n}/gpu0", "n0/gpu1") for c, n in ((renamed, "n9"), (before.cluster, "n1"))
    )
    assert (new.bandwidth_gb_per_s, new.latency_s) == (old.bandwidth_gb_per_s, old.latency_s)


REFUSED = {
    "lost: the cluster has no device or node 'n0/gpu9'; choose one such as n0/gpu": {
        "lost": ("n0/gpu9",)
    },
    "lost: 'n0' and 'n0/gpu0' both stand for 'n0/gpu0'": {"lost": ("n0", "n0/gpu0")},
    "lost: no device is left": {"lost": ("n0", "n1")},
    "slow: the cluster has no device or node 'n0/gpu0'": {
        "lost": ("n0/gpu0",),
        "slow": {"n0/gpu0": 2},
    },
    "lost: 'n0/gpu0' is named twice": {"lost": ("n0/gpu0", "n0/gpu0")},
    "slow: 'n1' and 'n1/gpu1' both stand for 'n1/gpu1'": {"slow": {"n1": 2, "n1/gpu1": 3}},
    "would lie among the devices of 'n0'; write n9=n1 for a node like it": {
        "added": ("n0/gpu2=n1",)
    },
    "added: n0/gpu1=n0/gpu0: the cluster has 'n0/gpu1' already": {"added": ("n0/gpu1=n0/gpu0",)},
    "nothing changed": {},
    "leave out the one or the others": {"cluster": nodes(2, 2), "lost": ("n0",)},
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_is_refused_by_name(text: str) -> None:
    with pytest.raises(PipeplanError) as error:
        changed(two_nodes(), **REFUSED[text])
    assert text in str(error.value)


@pytest.mark.parametrize("text", ["n0/gpu1", "n0/gpu1:", ":2", "n0/gpu1:fast", "n0:nan"])
def test_a_slow_device_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(PipeplanError, match=r"^slow: "):
        parse_slow([text])


def test_devices_are_slowed_by_one_factor_each() -> None:
    assert parse_slow(["host:0/gpu1:1.5", "n0:2"]) == {"host:0/gpu1": 1.5, "n0": 2}
    with pytest.raises(PipeplanError, match="'n0' is named twice"):
        parse_slow(["n0:2", "n0:3"])


@pytest.mark.parametrize("text", ["=n0", "n2", "rack2.toml"])
def test_an_addition_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(PipeplanError, match=r"^added: .* NAME=LIKE.* as the new cluster"):
        changed(two_nodes(), added=[text])


@cache
def gpt() -> LayerGraph:
    return trace("models.gpt:gpt_tiny")


@given(
    st.floats(1.001, 900),
    st.sampled_from([kind for kind in DEVICES.values() if "float32" in kind.peak_tflop_per_s]),
    st.deferred(lambda: st.sampled_from(gpt().record.layers)),
)
def test_everything_takes_so_many_times_as_long_on_a_slow_device(
    factor: float, kind: DeviceType, layer: object
) -> None:
    fast = layer_times(layer, "x", kind, "float32")
    slow = layer_times(layer, "x", slower(kind, factor), "float32")
    assert slow == pytest.approx([factor * seconds for seconds in fast])


def test_measured_times_of_slow_devices_are_longer_and_those_of_others_stay() -> None:
    times = {"forward_s": 0.1, "input_gradient_s": 0.2, "weight_gradient_s": 0.3, "backward_s": 0.4}
    graph = model(measured={"unit": times}, device_types=["unit"])
    plan = plan_of(graph, nodes(2, 2), [(3, "n0/gpu0"), (3, "n1/gpu0")])
    found = new_machines(plan, slow={"n1": 1.5, "n0/gpu1": 1.5})
    cluster, layer = found.problem.cluster, found.problem.graph.layers["l0"]
    kinds = {name: cluster.type_of(name) for name in cluster.device_names}
    assert kinds["n1/gpu0"] == kinds["n1/gpu1"] == kinds["n0/gpu1"] != kinds["n0/gpu0"] == "unit"
    slow = layer.measured[kinds["n1/gpu0"]]
    assert slow.model_dump() == pytest.approx({k: 1.5 * v for k, v in times.items()})
    assert layer.measured["unit"].model_dump() == times
    assert layer.may_run_on(kinds["n1/gpu0"])
    assert found.slowed == {"n1/gpu0", "n1/gpu1", "n0/gpu1"}
