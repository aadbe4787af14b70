"""Changes are read as they are written, and make the problem that an edit of its file makes."""

import json
from dataclasses import replace
from typing import Any

import pytest
from builders import cluster, device_type, graph, layer, link, orders, parameter, pipeline, star
from hypothesis import given
from hypothesis import strategies as st
from strategies import plans

from planner.analysis.what_if import parse_change
from planner.analysis.what_if.altered import Altered, alter, unaltered
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.simulation.simulator import simulate
from planner.variants.microbatches import with_samples

MEASURED = {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}


def changed(plan: Plan, text: str) -> Altered:
    return alter(unaltered(plan), parse_change(text))


def small_plan(**job: object) -> Plan:
    """Two stages on d0 and d1, of types left and right, around a hub."""
    types = {"left": device_type(), "right": device_type()}
    the_cluster = cluster(
        {"d0": "left", "d1": "right", "d2": "left"},
        [link(f"d{i}", "hub", latency_us=5) for i in range(3)],
        ["hub"],
        types,
    )
    rows = [
        layer("a", measured={"left": MEASURED}, device_types=["left"], parameters=["w"]),
        layer("b", stash_bytes=101),
    ]
    the_graph = graph(rows, parameters=[parameter("w")])
    placed = pipeline(the_graph, the_cluster, [(["a"], ["d0"]), (["b"], ["d1"])], **job)
    return plan_by_hand(placed, orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1"))


def sampled_plan(samples: int = 4) -> Plan:
    """One layer on one device: 2 microbatches of some samples."""
    the_graph = graph(
        [
            layer(
                "a",
                1,
                2,
                parameters=["w"],
                stash_bytes=101,
                batch_bytes=40,
                forward_traffic_bytes=9000,
            )
        ],
        [],
        [parameter("w")],
        samples_per_microbatch=samples,
    )
    placed = pipeline(the_graph, star(1), [(["a"], ["d0"])], samples_per_microbatch=samples)
    return plan_by_hand(placed, orders(d0="0F0 0B0 0F1 0B1"))


# --- reading --------------------------------------------------------------------------------------

GOOD = (
    "device n1/gpu3 memory x1.2",
    "device n1/gpu3 speed x0.5",
    "type A100-40GB memory x2",
    "type my own kind speed x1.1",
    "link n0-tor bandwidth x2",
    "links like n0>tor latency x0.5",
    "recompute h.3",
    "offload h.3",
    "keep h.3",
    "microbatches x2",
    "another n0/gpu0",
)


@pytest.mark.parametrize("text", GOOD)
def test_a_change_is_written_as_it_was_read(text: str) -> None:
    change = parse_change(text)
    assert str(change) == text
    assert parse_change(str(change)) == change


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("device d speed +20%", "device d speed x1.2"),
        ("  link   a-b  latency -50% ", "link a-b latency x0.5"),
        ("type t memory x1.20", "type t memory x1.2"),
    ],
)
def test_shares_and_spaces_are_read_too(text: str, same: str) -> None:
    assert parse_change(text) == parse_change(same)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "device NAME memory|speed xFACTOR"),
        ("nonsense", "link NAME-NAME bandwidth|latency xFACTOR"),
        ("device d0", "device NAME memory|speed xFACTOR"),
        ("recompute", "recompute LAYER"),
        ("links n0-tor bandwidth x2", "links like NAME-NAME"),
        ("device d0 bandwidth x2", "'bandwidth' is no figure of a device; write memory or speed"),
        ("link a-b speed x2", "'speed' is no figure of a link; write bandwidth or latency"),
        ("device d0 memory 2", "'2' is not a factor"),
        ("device d0 memory x-2", "'x-2' is not a factor"),
        ("device d0 memory x0", "'x0' is not a factor from x0.001 to x1000"),
        ("device d0 memory -100%", "'-100%' is not a factor"),
        ("device d0 memory x1e9", "'x1e9' is not a factor"),
        ("device d0 memory xnan", "'xnan' is not a factor"),
        ("microbatches x1.5", "'x1.5' is not a whole number of at least 2"),
        ("microbatches x1", "is not a whole number of at least 2"),
    ],
)
def test_what_is_wrong_with_a_change_is_said(text: str, said: str) -> None:
    with pytest.raises(PipeplanError) as error:
        parse_change(text)
    assert str(error.value).startswith(f"change {text!r}: ")
    assert said in str(error.value)


@given(st.text(max_size=30))
def test_any_text_is_a_change_or_an_error(text: str) -> None:
    try:
        change = parse_change(text)
    except PipeplanError:
        return
    assert parse_change(str(change)) == change


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device d9 memory x2", "no such device; choose one such as d0, d1, d2"),
        ("type middle speed x2", "no device of this type; choose one such as left"),
        ("link d0-d1 bandwidth x2", "no such link; choose one such as d"),
        ("recompute c", "no such layer; choose one such as a, b"),
        ("keep a", "the plan neither recomputes nor offloads it"),
        ("offload a", "the job forbids offloading stashes; set offload = true in it"),
        ("another hub", "no such device"),
        ("microbatches x2", "1 sample of a microbatch cannot be divided into 2 equal parts"),
    ],
)
def test_a_change_of_what_there_is_not_is_refused(text: str, said: str) -> None:
    with pytest.raises(PipeplanError) as error:
        changed(small_plan(), text)
    assert str(error.value).startswith(f"change '{text}': ")
    assert said in str(error.value)


def test_what_cannot_be_is_refused() -> None:
    types = {"unit": device_type(memory_gib=2, reserved_gib=1)}
    placed = pipeline(
        graph([layer("a", 1, 2)], []), cluster(["d0"], [], types=types), [(["a"], ["d0"])]
    )
    plan = plan_by_hand(placed, orders(d0="0F0 0B0 0F1 0B1"))
    with pytest.raises(PipeplanError, match="reserved_gib 1 leaves nothing of memory_gib 1"):
        changed(plan, "device d0 memory x0.5")
    forbidden = pipeline(graph([layer("a")], []), star(1), [(["a"], ["d0"])], recompute=False)
    plan = plan_by_hand(forbidden, orders(d0="0F0 0B0 0F1 0B1"))
    with pytest.raises(PipeplanError, match="the job forbids recomputation"):
        changed(plan, "recompute a")


# --- machines, against an edit of the file --------------------------------------------------------


def edited(plan: Plan, edit: Any) -> Problem:
    """The problem of a plan whose cluster is edited as plain data."""
    data = json.loads(plan.cluster.model_dump_json())
    edit(data)
    return replace(plan.problem, cluster=Cluster.from_data(data))


def assert_same_times(found: Altered, problem: Problem) -> None:
    """Both replay the plan alike, or neither does."""
    timeline = simulate(place(found.problem, found.stages), found.orders)
    expected = simulate(place(problem, found.stages), found.orders)
    assert timeline.iteration_time_s == pytest.approx(expected.iteration_time_s, rel=1e-9)
    capacity, same = timeline.pipeline.capacity_bytes, expected.pipeline.capacity_bytes
    for device in timeline.pipeline.devices:
        assert capacity(device) == same(device)


@given(plans(), st.data(), st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_a_changed_device_is_that_of_an_edited_file(
    plan: Plan, data: st.DataObject, factor: float
) -> None:
    device = data.draw(st.sampled_from(plan.cluster.device_names))
    figure = data.draw(st.sampled_from(["memory", "speed"]))
    kind = plan.cluster.type_of(device)

    def edit(rows: dict) -> None:
        own = json.loads(json.dumps(rows["device_types"][kind]))
        if figure == "memory":
            own["memory_gib"] *= factor
        else:
            own["memory_bandwidth_gb_per_s"] *= factor
            for name in own["peak_tflop_per_s"]:
                own["peak_tflop_per_s"][name] *= factor
        rows["device_types"]["edited"] = own
        for row in rows["devices"]:
            if row["name"] == device:
                row["type"] = "edited"

    assert_same_times(changed(plan, f"device {device} {figure} x{factor:g}"), edited(plan, edit))


@given(plans(), st.data(), st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_a_changed_link_is_that_of_an_edited_file(
    plan: Plan, data: st.DataObject, factor: float
) -> None:
    if not plan.cluster.links:
        return
    ends = data.draw(st.sampled_from([link.between for link in plan.cluster.links]))
    field = data.draw(st.sampled_from(["bandwidth_gb_per_s", "latency_us"]))

    def edit(rows: dict) -> None:
        for row in rows["links"]:
            if set(row["between"]) == set(ends):
                row[field] *= factor

    text = f"link {'-'.join(ends)} {field.split('_')[0]} x{factor:g}"
    assert_same_times(changed(plan, text), edited(plan, edit))


def test_a_device_alone_keeps_what_the_layers_know_of_its_type() -> None:
    """Layer a runs on the left type only and was measured there: 1 + 2 s, in half the time."""
    found = changed(small_plan(), "device d0 speed x2")
    placed = place(found.problem, found.stages)
    assert placed.stages[0].times["d0"].forward_s == 0.5
    assert placed.stages[0].times["d0"].backward_s == 1
    assert found.problem.cluster.type_of("d2") == "left"
    kind = found.problem.cluster.type_of("d0")
    assert found.problem.graph.layers["a"].may_run_on(kind)
    roomy = changed(small_plan(), "device d0 memory x2")
    assert place(roomy.problem, roomy.stages).stages[0].times["d0"].forward_s == 1


def test_a_type_is_all_its_devices() -> None:
    problem = changed(small_plan(), "type left speed x2").problem
    peaks = [problem.cluster.device_type(f"d{i}").peak_tflop_per_s["float32"] for i in range(3)]
    assert peaks == [2, 1, 2]
    assert problem.graph.layers["a"].measured["left"].forward_s == 0.5


def test_links_alike_change_together() -> None:
    plan = small_plan()
    rows = [
        link.bandwidth_gb_per_s
        for link in changed(plan, "link hub>d1 bandwidth x3").problem.cluster.links
    ]
    assert rows == [1, 3, 1]
    rows = [
        link.latency_us
        for link in changed(plan, "links like hub-d1 latency x2").problem.cluster.links
    ]
    assert rows == [10, 10, 10]


def test_a_name_that_may_be_several_links_is_refused() -> None:
    names = ["a", "b-c", "a-b", "c"]
    the_cluster = cluster(names, [link("a", "b-c"), link("a-b", "c")])
    placed = pipeline(graph([layer("x")], []), the_cluster, [(["x"], ["a"])])
    plan = plan_by_hand(placed, orders(a="0F0 0B0 0F1 0B1"))
    with pytest.raises(PipeplanError, match="several links; write a-b>c or a>b-c"):
        changed(plan, "link a-b-c bandwidth x2")
    rows = changed(plan, "link a>b-c bandwidth x2").problem.cluster.links
    assert [row.bandwidth_gb_per_s for row in rows] == [2, 1]


def test_another_device_is_a_twin_with_its_own_links() -> None:
    found = changed(small_plan(), "another d1").problem.cluster
    assert found.device_names == ("d0", "d1", "d2", "d3")
    assert found.type_of("d3") == "right"
    twin, old = found.route("d3", "d0"), found.route("d1", "d0")
    assert (twin.bandwidth_gb_per_s, twin.latency_s) == (old.bandwidth_gb_per_s, old.latency_s)
    assert set(twin.links) & set(found.route("d0", "d1").links) == set()


# --- the plan and the job -------------------------------------------------------------------------


def test_recomputation_is_a_change_of_the_plan_alone() -> None:
    plan = small_plan()
    found = changed(plan, "recompute b")
    assert found.is_of_plan
    assert [stage.recompute for stage in found.stages] == [(), ("b",)]
    assert found.problem.digest == plan.problem.digest
    assert alter(found, parse_change("keep b")).stages == unaltered(plan).stages


def test_smaller_microbatches_are_in_proportion_but_for_weights() -> None:
    """w has 4000 bytes: 9000 bytes of traffic become 4000 + 5000 / 2; 101 of stash 51."""
    found = changed(sampled_plan(), "microbatches x2")
    row = found.problem.graph.layers["a"]
    assert row.forward_flops == 10**12 // 2
    assert row.forward_traffic_bytes == 4000 + 2500
    assert (row.stash_bytes, row.batch_bytes) == (51, 20)
    assert (found.problem.job.samples_per_microbatch, found.problem.job.microbatches) == (2, 4)
    assert [str(word) for word in found.orders["d0"]] == ("0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3".split())
    assert found.assumes is not None


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("with split", "backward", "any"),
        ("with chunks", "max_stages_per_device", 2),
        ("without replicas", "replication", False),
        ("without recompute", "recompute", False),
        ("without overlap", "overlap_reduction", False),
    ],
)
def test_a_freedom_is_a_field_of_the_job(text: str, field: str, value: object) -> None:
    plan = small_plan()
    assert changed(plan, text).problem.job == plan.job.model_copy(update={field: value})
    assert str(parse_change(text)) == text
    opposite = text.replace("with ", "without ") if "with " in text else text.replace("out", "")
    with pytest.raises(PipeplanError, match=rf"job\.{field} is .* already"):
        changed(plan, opposite)


def test_an_unknown_freedom_is_named() -> None:
    with pytest.raises(PipeplanError, match="'wings' is no freedom of plans; write one of split"):
        parse_change("with wings")


def work_row(phase: str, kind: str, flops: int, bytes_: int) -> dict[str, object]:
    figures = {"flops": flops, "traffic_bytes": bytes_}
    return {"phase": phase, "operation_class": kind, "operations": 2, **figures}


def test_the_operations_of_a_layer_are_as_small_as_the_layer() -> None:
    """A product reads 4000 bytes of weights and 5000 others; an activation moves 600."""
    row = {
        **layer("a", 0, 0),
        "forward_flops": 800,
        "forward_traffic_bytes": 9600,
        "parameters": ["w"],
        "work": [
            work_row("forward", "memory", 0, 600),
            work_row("forward", "product", 800, 9000),
        ],
    }
    whole = graph([row], [], [parameter("w")], samples_per_microbatch=4)
    found = with_samples(whole, 2).layers["a"]
    assert [(part.flops, part.traffic_bytes) for part in found.work] == [(0, 300), (400, 6500)]
    assert (found.forward_flops, found.forward_traffic_bytes) == (400, 6800)
    # What was written by hand is what a file may hold.
    assert LayerGraph.parse(json.loads(with_samples(whole, 2).record.model_dump_json()))


def test_a_graph_becomes_larger_by_the_same_proportions() -> None:
    whole = sampled_plan().problem.graph
    assert with_samples(whole, 4) is whole
    found = with_samples(whole, 6)
    assert found.record.samples_per_microbatch == 6
    assert found.layers["a"].forward_flops == 10**12 * 6 // 4
    assert found.layers["a"].forward_traffic_bytes == 4000 + 5000 * 6 // 4


def test_measured_times_are_not_divided() -> None:
    plan = sampled_plan()
    rows = [
        {**json.loads(plan.model.graph.layers[0].model_dump_json()), "measured": {"unit": MEASURED}}
    ]
    data = {**json.loads(plan.model.graph.model_dump_json()), "layers": rows}
    problem = Problem(LayerGraph.parse(data), plan.cluster, plan.job)
    start = Altered(problem, unaltered(plan).stages, plan.parsed_orders())
    with pytest.raises(PipeplanError, match="measured with 4 samples a microbatch; measure with 2"):
        alter(start, parse_change("microbatches x2"))


def test_an_unchanged_plan_is_left_as_it_was() -> None:
    plan = small_plan()
    before = plan.model_dump_json()
    for text in ("device d0 speed x2", "link d0-hub bandwidth x2", "recompute b", "another d0"):
        changed(plan, text)
    assert plan.model_dump_json() == before
