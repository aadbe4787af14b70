"""What is saved is what is read; a digest tells contents apart and nothing else."""

import copy
import json
import pickle
from pathlib import Path

import networkx as nx
import pytest
from builders import cluster, device_type, graph, layer, link, parameter
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import clusters, jobs, layer_graphs, orders_for, partitions, plans, problems

from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.placement import place, place_plan
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation, format_order, parse_order
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.prediction import refresh
from planner.records.document import digest
from planner.simulation.simulator import simulate_plan
from planner.verification import verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@given(plan=plans())
def test_a_saved_plan_is_what_it_was_and_holds(plan: Plan, folder: Path) -> None:
    plan.save(folder / "plan.json")
    read = Plan.load(folder / "plan.json")
    assert read == plan
    assert verify(read) == []
    assert simulate_plan(read).iteration_time_s == plan.predicted.iteration_time_s
    assert refresh(read) == plan


@given(st.data())
def test_a_plan_says_all_of_what_it_was_made_from(data: st.DataObject) -> None:
    problem: Problem = data.draw(problems())
    pipeline = place(problem, data.draw(partitions(problem)))
    orders = data.draw(orders_for(pipeline))
    plan = Plan.parse(json.loads(plan_by_hand(pipeline, orders).model_dump_json()))
    assert plan.problem.cluster == problem.cluster
    # What the orders need is allowed.
    assert plan.job == problem.job.model_copy(update={"backward": plan.job.backward})
    assert plan.problem.source == problem.source
    assert plan.problem.graph.record == problem.graph.record
    assert place_plan(plan).stages == pipeline.stages
    assert {d: list(o) for d, o in plan.parsed_orders().items()} == orders


@given(the_graph=layer_graphs())
def test_a_layer_graph_survives_its_file(the_graph: LayerGraph, folder: Path) -> None:
    the_graph.save(folder / "graph.json")
    read = LayerGraph.load(folder / "graph.json")
    assert read.record == the_graph.record
    assert read.digest == the_graph.digest
    assert dict(read.nodes(data=True)) == dict(the_graph.nodes(data=True))
    assert list(read.edges(data=True)) == list(the_graph.edges(data=True))


@pytest.mark.extensive
@pytest.mark.parametrize("name", ["cluster.json", "cluster.toml"])
@given(the_cluster=clusters(connected=False))
def test_a_cluster_survives_its_file(name: str, the_cluster: Cluster, folder: Path) -> None:
    the_cluster.save(folder / name)
    assert Cluster.load(folder / name) == the_cluster
    assert digest(Cluster.load(folder / name)) == digest(the_cluster)


@pytest.mark.parametrize("name", ["cluster.json", "cluster.toml"])
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    figure=st.floats(1e-9, 1e15),
)
@example(text='a"b\\c\x7f\x00\r\n\u2028\x85', figure=1e-9)
@example(text="fast.gpu # 1", figure=0.1 + 0.2)
def test_any_text_and_figure_of_a_cluster_survive_its_file(
    name: str, text: str, figure: float, folder: Path
) -> None:
    kinds = {text: device_type(peak_tflop_per_s={text: figure})}
    wires = [link("d0", "d1", figure, latency_us=figure, duplex="half", shared=True)]
    made = cluster({"d0": text, "d1": text}, wires, types=kinds).model_copy(update={"name": text})
    made.save(folder / name)
    assert Cluster.load(folder / name) == made


@given(jobs())
def test_a_job_survives_its_data(job: Job) -> None:
    assert Job.parse(json.loads(job.model_dump_json()), "job") == job


def test_an_expanded_cluster_keeps_the_device_types_that_nobody_has() -> None:
    one = cluster(["d0"], [], types={"unit": device_type(), "spare": device_type()})
    assert set(one.device_types) == {"unit", "spare"}
    whole = Cluster.model_validate({**dict(one), "name": "whole"})
    assert Cluster.from_data(json.loads(whole.model_dump_json())) == whole


@pytest.mark.extensive
@given(layer_graphs(), layer_graphs())
def test_digests_are_equal_exactly_if_graphs_are(one: LayerGraph, other: LayerGraph) -> None:
    assert (one.digest == other.digest) == (one.record == other.record)
    assert one.digest == LayerGraph.parse(json.loads(one.record.model_dump_json())).digest


def leaves(value: object, path: tuple = ()) -> list[tuple]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for i, inner in enumerate(value) for leaf in leaves(inner, (*path, i))]
    return [path]


@given(layer_graphs(), st.data())
def test_a_change_anywhere_in_a_graph_changes_its_digest(
    the_graph: LayerGraph, data: st.DataObject
) -> None:
    plain = the_graph.record.model_dump(mode="json")
    path = data.draw(st.sampled_from(leaves(plain)))
    changed = copy.deepcopy(plain)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    old = holder[path[-1]]
    match old:
        case bool():
            holder[path[-1]] = not old
        case int():
            holder[path[-1]] = old + 1
        case float():
            holder[path[-1]] = old / 2 + 0.25
        case None:
            holder[path[-1]] = "l0"
        case str():
            holder[path[-1]] = old + "x"
        case list() | dict():
            holder[path[-1]] = {} if isinstance(old, list) else []
    try:
        other = LayerGraph.parse(changed)
    except PipeplanError:
        return  # Most names and all empty tables may not change alone.
    assert (other.digest == the_graph.digest) == (other.record == the_graph.record)
    assert other.record != the_graph.record


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    rows = [layer("a", parameters=["w"])]
    plain = graph(rows, parameters=[parameter("w")]).record.model_dump(mode="json")
    backwards = dict(reversed(plain.items()))
    backwards["layers"] = [dict(reversed(row.items())) for row in plain["layers"]]
    assert LayerGraph.parse(backwards).digest == LayerGraph.parse(plain).digest
    assert digest(LayerGraph.parse(plain).record).startswith("sha256:")


@given(layer_graphs())
def test_a_layer_graph_is_a_networkx_graph_of_its_record(the_graph: LayerGraph) -> None:
    record = the_graph.record
    assert list(the_graph) == [row.name for row in record.layers]
    wanted: dict[tuple[str, str], int] = {}
    for tensor in record.boundaries:
        for user in tensor.users:
            edge = (tensor.producer, user)
            wanted[edge] = wanted.get(edge, 0) + tensor.bytes
    assert {(u, v): size for u, v, size in the_graph.edges(data="bytes")} == wanted
    size = {row.name: row.bytes for row in record.parameters}
    for row in record.layers:
        node = the_graph.nodes[row.name]
        assert node["parameter_bytes"] == sum(size[name] for name in row.parameters)
        assert node["forward_flops"] == row.forward_flops
    assert {p.name for p in the_graph.parameters_of(the_graph)} == {
        name for row in record.layers for name in row.parameters
    }


def test_a_layer_graph_is_read_only_and_travels_between_processes() -> None:
    the_graph = graph([layer("a"), layer("b")])
    with pytest.raises(Exception, match=r"[Ff]rozen"):
        the_graph.add_edge("b", "a")
    for twin in (copy.copy(the_graph), pickle.loads(pickle.dumps(the_graph))):  # noqa: S301
        assert twin.record == the_graph.record
        assert list(twin.edges) == [("a", "b")]


def test_a_copy_of_a_layer_graph_is_a_layer_graph() -> None:
    the_graph = graph([layer("a"), layer("b")])
    for twin in (the_graph.copy(), the_graph.copy(as_view=True), copy.deepcopy(the_graph)):
        assert isinstance(twin, LayerGraph)
        assert twin.record == the_graph.record
        assert dict(twin.nodes(data=True)) == dict(the_graph.nodes(data=True))
        assert nx.is_frozen(twin)


def test_an_edit_of_an_attribute_that_no_solver_would_see_is_refused() -> None:
    measured = {"gpu": {"forward_s": 1, "input_gradient_s": 1, "weight_gradient_s": 1}}
    plain = graph([layer("a"), layer("b")]).record.model_dump(mode="json")
    plain["layers"][0]["measured"] = measured
    the_graph = LayerGraph.parse(plain)
    node, edge = the_graph.nodes["a"], the_graph.edges["a", "b"]
    assert node["measured"] == measured
    edits = [
        lambda: node.__setitem__("forward_flops", 5),
        lambda: node.update(forward_flops=5),
        lambda: node.update(new=5),
        lambda: node.pop("forward_flops"),
        lambda: node.popitem(),
        lambda: node.clear(),
        lambda: node.setdefault("new", 5),
        lambda: node.__delitem__("forward_flops"),
        lambda: node.__ior__({"forward_flops": 5}),
        lambda: node["measured"].__setitem__("cpu", {}),
        lambda: node["measured"]["gpu"].__setitem__("forward_s", 2),
        lambda: edge.__setitem__("bytes", 5),
        lambda: the_graph["a"]["b"].update(bytes=5),
        lambda: the_graph.pred["b"]["a"].update(bytes=5),
        lambda: the_graph.graph.update(name="other"),
        lambda: nx.set_node_attributes(the_graph, 5, "forward_flops"),
        lambda: nx.set_edge_attributes(the_graph, 5, "bytes"),
    ]
    for edit in edits:
        with pytest.raises(nx.NetworkXError, match=r"read-only.*LayerGraph\.from_record"):
            edit()
    copy.deepcopy(node)["measured"]["gpu"]["forward_s"] = 2
    nx.DiGraph(the_graph).nodes["a"]["measured"] = {}
    twin = LayerGraph.from_record(the_graph.record)
    assert nx.utils.graphs_equal(the_graph, twin)
    assert pickle.loads(pickle.dumps(node)) == dict(node)  # noqa: S301


operations = st.builds(
    Operation, st.integers(0, 999_999), st.sampled_from("FBIW"), st.integers(0, 9_999_999)
)


@given(st.lists(operations))
def test_an_order_survives_its_text(order: list[Operation]) -> None:
    assert parse_order(format_order(order), "orders") == tuple(order)


@given(st.text(alphabet="0123FBIWX-+. \n\u0661²", max_size=12))
def test_whatever_is_no_operation_is_named_with_its_place(text: str) -> None:
    def is_operation(word: str) -> bool:
        stage, kind, microbatch = word[:-2], word[-2:-1], word[-1:]
        for cut in range(1, len(word)):
            if word[cut] in "FBIW":
                stage, kind, microbatch = word[:cut], word[cut], word[cut + 1 :]
                break
        digits = set("0123456789")
        return bool(
            kind in tuple("FBIW")
            and stage
            and microbatch
            and set(stage) | set(microbatch) <= digits
            and len(stage) <= 6
            and len(microbatch) <= 7
        )

    wrong = [(i, word) for i, word in enumerate(text.split(), 1) if not is_operation(word)]
    if not wrong:
        assert len(parse_order(text, "orders")) == len(text.split())
        return
    with pytest.raises(PipeplanError) as raised:
        parse_order(text, "orders")
    assert len(raised.value.problems) == len(wrong)
    for (position, word), problem in zip(wrong, raised.value.problems, strict=True):
        assert problem.startswith(f"orders: word {position} is {word!r}")
