"""What a stage receives, sends, keeps and shares, worked out anew tensor by tensor."""

from collections import defaultdict

import pytest
from builders import (
    GIGA,
    boundary,
    cluster,
    device_type,
    graph,
    layer,
    link,
    parameter,
    pipeline,
    star,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import partitions, problems

from planner.costs.collectives import all_reduce_s
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import is_connected, place
from planner.costs.roofline import layer_times
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem


@st.composite
def placed_pipelines(draw: st.DrawFn) -> PlacedPipeline:
    problem: Problem = draw(problems())
    return place(problem, draw(partitions(problem)))


def stage_of(placed: PlacedPipeline) -> dict[str, int]:
    return {name: i for i, stage in enumerate(placed.stages) for name in stage.spec.layers}


@given(placed_pipelines())
def test_a_cut_carries_every_tensor_made_before_and_used_after(placed: PlacedPipeline) -> None:
    """A skip is handed on from stage to stage until its last user has it."""
    stages = stage_of(placed)
    received = defaultdict(int)
    gradients = defaultdict(int)
    for tensor in placed.problem.graph.record.boundaries:
        last = max(stages[user] for user in tensor.users)
        for index in range(stages[tensor.producer] + 1, last + 1):
            received[index] += tensor.bytes
            gradients[index] += tensor.bytes * tensor.requires_grad
    count = len(placed.stages)
    assert [s.input_bytes for s in placed.stages] == [received[i] for i in range(count)]
    assert [s.output_bytes for s in placed.stages] == [received[i + 1] for i in range(count)]
    found = [s.input_gradient_bytes for s in placed.stages]
    assert found == [gradients[i] for i in range(count)]
    found = [s.output_gradient_bytes for s in placed.stages]
    assert found == [gradients[i + 1] for i in range(count)]


@given(placed_pipelines())
def test_a_stage_keeps_its_input_and_what_its_layers_save(placed: PlacedPipeline) -> None:
    """A recomputed layer saves nothing but what it starts from. Nothing is kept twice."""
    the_graph = placed.problem.graph
    stages = stage_of(placed)
    for index, stage in enumerate(placed.stages):
        saving = set(stage.spec.layers) - set(stage.spec.recompute)
        kept = sum(the_graph.layers[name].stash_bytes for name in saving)
        for tensor in the_graph.record.boundaries:
            producer, last = stages[tensor.producer], max(stages[u] for u in tensor.users)
            received = producer < index <= last
            restart = producer == index and set(tensor.users) & set(stage.spec.recompute)
            if (received or restart) and tensor.saved_by not in saving:
                kept += tensor.bytes
        assert stage.stash_bytes == kept


def gradient_width(job: Job) -> int:
    """Bytes of an element's gradient."""
    return 2 if (job.precision, job.gradient_precision) == ("bfloat16", "weights") else 4


@given(placed_pipelines())
def test_static_memory_is_weights_gradients_and_state(placed: PlacedPipeline) -> None:
    job, the_graph = placed.problem.job, placed.problem.graph
    state = {"adamw": 8, "sgd": 0, "sgd_momentum": 4}[job.optimizer]
    state += 0 if job.precision == "float32" else 4
    gradient = gradient_width(job)
    for stage in placed.stages:
        used = {n for name in stage.spec.layers for n in the_graph.layers[name].parameters}
        expected = 0
        for row in the_graph.record.parameters:
            if row.name in used:
                expected += row.bytes
                expected += (gradient + state) * row.elements if row.trainable else 0
        assert stage.static_bytes == expected


@given(placed_pipelines())
def test_the_workspace_is_what_running_layers_hold_beside_whole_stashes(
    placed: PlacedPipeline,
) -> None:
    """A microbatch goes forward and back layer by layer, all others' stashes are whole."""
    the_graph = placed.problem.graph
    for stage in placed.stages:
        again = set(stage.spec.recompute)
        kept = {name: the_graph.layers[name].stash_bytes for name in stage.spec.layers}
        for name in again & set(kept):
            kept[name] = sum(
                tensor.bytes
                for tensor in the_graph.record.boundaries
                if tensor.saved_by == name and name in tensor.users
            )
        held = [
            sum(kept[before] for before in stage.spec.layers[:number]) + peak_bytes(the_graph, name)
            for number, name in enumerate(stage.spec.layers)
        ]
        assert stage.workspace_bytes == max(0, max(held) - sum(kept.values()))


def peak_bytes(the_graph: LayerGraph, name: str) -> int:
    """As told, or the stash, outputs with their gradients, those of inputs and of a weight."""
    told = the_graph.layers[name]
    if told.peak_bytes is not None:
        return told.peak_bytes
    parameters = [the_graph.parameters[used] for used in told.parameters]
    found = told.stash_bytes + max((p.bytes for p in parameters if p.trainable), default=0)
    for tensor in the_graph.record.boundaries:
        found += 2 * tensor.bytes * (tensor.producer == name)
        found += tensor.bytes * (name in tensor.users and tensor.requires_grad)
    return found


def test_stages_of_a_device_share_their_workspace() -> None:
    rows = [layer("a", peak_bytes=GIGA), layer("b", peak_bytes=3 * GIGA)]
    the_graph = graph(rows, [boundary("a", "b", bytes_=0)])
    apart = pipeline(the_graph, star(2), [(["a"], ["d0"]), (["b"], ["d0"])])
    assert apart.static_bytes("d0") == 3 * GIGA


@given(placed_pipelines())
def test_a_stage_takes_the_time_of_its_layers(placed: PlacedPipeline) -> None:
    problem = placed.problem
    for index, stage in enumerate(placed.stages):
        for device in stage.spec.devices:
            rows = [
                layer_times(
                    problem.graph.layers[name],
                    problem.cluster.type_of(device),
                    problem.cluster.device_type(device),
                    problem.job.precision,
                    name in stage.spec.recompute,
                )
                for name in stage.spec.layers
            ]
            for kind in "FBIW":
                expected = sum(row.seconds(kind) for row in rows)
                assert placed.seconds(index, kind, device) == pytest.approx(expected)


@given(placed_pipelines())
def test_every_copy_of_a_trainable_parameter_is_reduced_once(placed: PlacedPipeline) -> None:
    the_graph = placed.problem.graph
    wanted: dict[tuple[int, ...], int] = defaultdict(int)
    for row in the_graph.record.parameters:
        holders = tuple(
            index
            for index, stage in enumerate(placed.stages)
            if any(row.name in the_graph.layers[name].parameters for name in stage.spec.layers)
        )
        devices = {d for index in holders for d in placed.stages[index].spec.devices}
        if row.trainable and row.bytes and len(devices) > 1:
            wanted[holders] += gradient_width(placed.problem.job) * row.elements
    reduced: dict[tuple[int, ...], int] = defaultdict(int)
    for sync in placed.synchronisations:
        reduced[sync.stages] += sync.bytes
    assert reduced == wanted
    for sync in placed.synchronisations:
        members = {d for index in sync.stages for d in placed.stages[index].spec.devices}
        assert set(sync.devices) == members
        seconds = all_reduce_s(placed.problem.cluster, sync.devices, sync.bytes)
        assert sync.seconds == seconds


@given(placed_pipelines())
def test_the_optimizer_step_moves_each_parameter_on_a_device_once(placed: PlacedPipeline) -> None:
    problem = placed.problem
    state = problem.job.optimizer_bytes_per_element
    for device in placed.devices:
        held = {
            name
            for stage in placed.stages
            if device in stage.spec.devices
            for layer_name in stage.spec.layers
            for name in problem.graph.layers[layer_name].parameters
        }
        rows = [problem.graph.parameters[name] for name in held]
        each = gradient_width(problem.job) + 2 * state
        moved = sum(2 * r.bytes + each * r.elements for r in rows if r.trainable)
        speed = problem.cluster.device_type(device).memory_bandwidth_gb_per_s * 1e9
        assert placed.optimizer_s[device] == pytest.approx(moved / speed)


@given(
    capacity=st.integers(1, 40),
    stash=st.integers(0, 8),
    output=st.integers(0, 8),
    microbatches=st.integers(1, 6),
)
def test_a_stash_limit_is_the_most_that_fits(
    capacity: int, stash: int, output: int, microbatches: int
) -> None:
    """In units of a 128th of a GiB; the workspace is twice the output."""
    unit = 2**23
    rows = [layer("a", stash_bytes=stash * unit), layer("b")]
    small = device_type(memory_gib=capacity / 128)
    machines = cluster(["d0", "d1"], [link("d0", "d1")], types={"unit": small})
    placed = pipeline(
        graph(rows, [boundary("a", "b", bytes_=output * unit)]),
        machines,
        [(["a"], ["d0"]), (["b"], ["d1"])],
        microbatches=microbatches,
    )
    fitting = [n for n in range(microbatches + 1) if 3 * output + n * stash <= capacity]
    assert placed.stash_limit(0, "d0") == max(fitting, default=0)


def test_a_tied_parameter_in_one_stage_needs_no_reduction_and_counts_once() -> None:
    rows = [layer("a", parameters=["w"]), layer("b", parameters=["w"])]
    the_graph = graph(rows, [boundary("a", "b", bytes_=0)], [parameter("w", GIGA)])
    together = pipeline(the_graph, star(2), [(["a", "b"], ["d0"])])
    assert together.stages[0].static_bytes == 8 * GIGA
    assert together.synchronisations == ()
    apart = pipeline(the_graph, star(2), [(["a"], ["d0"]), (["b"], ["d1"])])
    assert [stage.static_bytes for stage in apart.stages] == [8 * GIGA, 8 * GIGA]
    assert [s.stages for s in apart.synchronisations] == [(0, 1)]


def test_neighbours_without_a_path_are_named() -> None:
    islands = cluster(["d0", "d1", "d2"], [link("d0", "d1")])
    stages = [(["a"], ["d0"]), (["b"], ["d2"])]
    placed = pipeline(graph([layer("a"), layer("b")]), islands, stages)
    assert not is_connected(placed)
    with pytest.raises(PipeplanError, match="'d0' and 'd2'"):
        placed.transfer(0, "F", "d0", "d2")


def test_replicas_without_a_path_are_not_connected() -> None:
    rows = [layer("a", parameters=["w"])]
    the_graph = graph(rows, [], [parameter("w")])
    islands = cluster(["d0", "d1"], [])
    assert not is_connected(pipeline(the_graph, islands, [(["a"], ["d0", "d1"])]))
    assert is_connected(pipeline(the_graph, islands, [(["a"], ["d0"])]))
