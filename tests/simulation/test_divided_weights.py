"""Replicas that put layers together: times and memory worked out by hand."""

import pytest
from builders import (
    GIGA,
    boundary,
    cluster,
    device_type,
    graph,
    layer,
    link,
    orders,
    parameter,
    pipeline,
    star,
)

from planner.analysis.explain.parts import iteration_parts
from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import DeadlockError
from planner.simulation.critical_path import critical_path
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

DIVIDED = {"shard_parameters": True, "equal_pipelines": True, "backward": "whole"}


def one_layer(**job: object) -> PlacedPipeline:
    """4 GB of weights on two devices, which put them together in 2 s."""
    the_graph = graph(
        [layer("a", parameters=["w"])], parameters=[parameter("w", elements=GIGA)], boundaries=[]
    )
    fields = {"microbatches": 4, "optimizer": "adamw", **DIVIDED, **job}
    return pipeline(the_graph, star(2), [(["a"], ["d0", "d1"])], **fields)


def spans(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(e.operation): (e.start_s, e.end_s) for e in timeline.operations}


def test_every_operation_has_its_collectives() -> None:
    """1 s forward after a gather of 2 s; 2 s backward between a gather and a reduce-scatter."""
    placed = one_layer()
    timeline = simulate(placed, orders(d0="0F0 0B0 0F1 0B1", d1="0F2 0B2 0F3 0B3"))
    assert spans(timeline) == {
        **{"0F0": (0, 3), "0B0": (3, 9), "0F1": (9, 12), "0B1": (12, 18)},
        **{"0F2": (0, 3), "0B2": (3, 9), "0F3": (9, 12), "0B3": (12, 18)},
    }
    assert not timeline.synchronisations
    assert not timeline.gathers
    # AdamW reads and writes 12 GB of weights and gradients, and 8 GB of state twice, each a half.
    assert timeline.iteration_time_s == pytest.approx(18.014)
    parts = {row.name: row.seconds for row in iteration_parts(timeline, critical_path(timeline))}
    assert parts == pytest.approx(
        {
            "all-gathers of parameters": 8,
            "backwards": 4,
            "reductions": 4,
            "forwards": 2,
            "optimizer step": 0.014,
        }
    )


def test_devices_hold_their_parts_and_the_layer_that_runs() -> None:
    divided, whole = one_layer(), one_layer(shard_parameters=False, shard_optimizer=True)
    assert whole.stages[0].static_bytes == 4 * GIGA + 4 * GIGA + 8 * GIGA // 2
    assert divided.stages[0].static_bytes == (4 * GIGA + 4 * GIGA + 8 * GIGA) // 2
    more = divided.stages[0].workspace_bytes - whole.stages[0].workspace_bytes
    assert more == 4 * GIGA + 4 * GIGA


def test_parameters_of_several_layers_stay_whole() -> None:
    """They are reduced once, after the last backward: 2 s and, after the step, 2 s more."""
    rows = [layer("a", parameters=["w", "own"]), layer("b", parameters=["w"])]
    parameters = [parameter("w", elements=GIGA), parameter("own", elements=GIGA // 2)]
    placed = pipeline(
        graph(rows, [boundary("a", "b", bytes_=0)], parameters),
        star(2),
        [(["a", "b"], ["d0", "d1"])],
        overlap_reduction=False,
        **DIVIDED,
    )
    timeline = simulate(placed, orders(d0="0F0 0B0", d1="0F1 0B1"))
    assert spans(timeline)["0B0"] == (2 + 1, 2 + 1 + 4 + 1 + 1)
    (reduced,), (gathered,) = timeline.synchronisations, timeline.gathers
    assert (reduced.start_s, reduced.end_s) == (9, 11)
    assert gathered.end_s - gathered.start_s == pytest.approx(2)
    assert placed.stages[0].static_bytes == 2 * 4 * GIGA + 2 * 2 * GIGA // 2


def test_a_stage_of_one_device_has_all_of_it() -> None:
    the_graph = graph(
        [layer("a", parameters=["w"])], parameters=[parameter("w", elements=GIGA)], boundaries=[]
    )
    placed = pipeline(the_graph, star(1), [(["a"], ["d0"])], **DIVIDED)
    timeline = simulate(placed, orders(d0="0F0 0B0 0F1 0B1"))
    assert spans(timeline)["0B1"] == (4, 6)
    assert placed.stages[0].static_bytes == 2 * 4 * GIGA


@pytest.mark.parametrize(("sides", "seconds"), [("left right", 4), ("left left", 2)])
def test_collectives_of_stages_share_links(sides: str, seconds: float) -> None:
    """2 GB for each way of a switch that carries 1 GB/s, which both stages' rings cross or not."""
    rows = [layer(name, parameters=[f"w{name}"]) for name in "ab"]
    parameters = [parameter(f"w{name}", elements=GIGA) for name in "ab"]
    ends = dict(zip(("d0", "d1", "d2", "d3"), (*sides.split(), *sides.split()), strict=True))
    links = [link(*ends_of) for ends_of in ends.items()] + [link("left", "right")]
    placed = pipeline(
        graph(rows, [boundary("a", "b", bytes_=0)], parameters),
        cluster([*ends], links, ["left", "right"]),
        [(["a"], ["d0", "d1"]), (["b"], ["d2", "d3"])],
        **DIVIDED,
    )
    both = (seconds, seconds)  # A gather of weights, and a reduction of gradients.
    assert [stage.collective_s for stage in placed.stages] == [{"a": both}, {"b": both}]


def two_speeds() -> PlacedPipeline:
    """Half the speed on d1."""
    the_graph = graph(
        [layer("a", parameters=["w"])], parameters=[parameter("w", elements=GIGA)], boundaries=[]
    )
    types = {"fast": device_type(), "slow": device_type(peak_tflop_per_s={"float32": 0.5})}
    machines = cluster(
        {"d0": "fast", "d1": "slow"}, [link(d, "hub") for d in ("d0", "d1")], ["hub"], types
    )
    return pipeline(the_graph, machines, [(["a"], ["d0", "d1"])], microbatches=4, **DIVIDED)


def test_replicas_start_together_and_wait_for_the_slower() -> None:
    timeline = simulate(two_speeds(), orders(d0="0F0 0B0 0F1 0B1", d1="0F2 0B2 0F3 0B3"))
    assert spans(timeline) == {
        **{"0F0": (0, 3), "0B0": (4, 10), "0F1": (12, 15), "0B1": (16, 22)},
        **{"0F2": (0, 4), "0B2": (4, 12), "0F3": (12, 16), "0B3": (16, 24)},
    }
    path = critical_path(timeline)
    assert [step.event.device for step in path[:4]] == ["d1"] * 4
    assert sum(step.seconds for step in path) == pytest.approx(timeline.iteration_time_s)


def test_what_a_replica_waited_for_is_on_the_path() -> None:
    """d2 waits for d3, whose microbatch comes over a slow link; d0, behind d2, ends last."""
    links = [link("d0", "d2"), link("d1", "d3", 0.2), link("d2", "d3")]
    links += [link("d0", "d3", 0.125), link("d1", "d2", 0.125)]
    types = {"unit": device_type(), "slow": device_type(peak_tflop_per_s={"float32": 0.25})}
    machines = cluster({"d0": "slow", "d1": "unit", "d2": "unit", "d3": "unit"}, links, (), types)
    rows = [layer("a"), layer("b", parameters=["w"])]
    placed = pipeline(
        graph(rows, [boundary("a", "b", bytes_=GIGA)], [parameter("w", elements=GIGA // 4)]),
        machines,
        [(["a"], ["d0", "d1"]), (["b"], ["d2", "d3"])],
        **DIVIDED,
    )
    timeline = simulate(placed, orders(d0="0F0 0B0", d1="0F1 0B1", d2="1F0 1B0", d3="1F1 1B1"))
    found = spans(timeline)
    assert found["1F0"] == found["1F1"] == (6, 7.5)
    assert found["1B0"] == found["1B1"] == (7.5, 10.5)
    assert (found["0B0"], found["0B1"]) == ((11.5, 19.5), (15.5, 17.5))
    path = critical_path(timeline)
    assert [(str(s.event.operation), s.waited_for) for s in path[:-1]] == [
        ("0F1", "nothing"),
        ("0F1", "producer"),
        ("1F0", "replica"),
        ("1B0", "device"),
        ("1B0", "producer"),
        ("0B0", "tensor"),
    ]


def test_replicas_in_other_orders_wait_for_ever() -> None:
    with pytest.raises(DeadlockError, match="waits at 0F1 for replicas"):
        simulate(one_layer(), orders(d0="0F0 0F1 0B0 0B1", d1="0F2 0B2 0F3 0B3"))
