"""The lines say what an explanation found, what binds first; the data says all of it."""

import json
from dataclasses import replace

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

from planner.analysis.explain import explain
from planner.analysis.explain.memory import MemoryLimit, MemoryRoom
from planner.analysis.explain.path_shares import PathShare, Spent
from planner.report.explanation import explanation_data, explanation_lines
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

GIB = 2**30
ALTERNATING = orders(d0="0F0 0B0 0F1 0B1", d1="1F0 1B0 1F1 1B1")


def lines(timeline: Timeline) -> list[str]:
    return explanation_lines(explain(timeline))


def two_stages(memory_gib: float = 1024, stash_bytes: int = 0, **link_fields: object) -> Timeline:
    """0F0 0B0 0F1 0B1: two microbatches, one after the other, each 6 s and two transfers."""
    rows = [layer("a", stash_bytes=stash_bytes), layer("b")]
    types = {"unit": device_type(), "small": device_type(memory_gib=memory_gib)}
    bytes_ = link_fields.pop("bytes_", 0)
    wires = [link("d0", "d1", **link_fields)]
    the_graph = graph(rows, [boundary("a", "b", bytes_=bytes_)])
    machines = cluster({"d0": "small", "d1": "unit"}, wires, types=types)
    return simulate(pipeline(the_graph, machines, [(["a"], ["d0"]), (["b"], ["d1"])]), ALTERNATING)


def test_every_explanation_has_few_lines(timeline: Timeline) -> None:
    said = lines(timeline)
    assert 4 <= len(said) <= 6
    assert said[0].startswith("iteration ")
    assert said[-1].startswith("bubble ")


def test_a_reached_bound_comes_before_the_path() -> None:
    """One device computes from the first moment to the last: 2 * 3 s."""
    placed = pipeline(graph([layer("a")], []), star(1), [(["a"], ["d0"])])
    assert lines(simulate(placed, orders(d0="0F0 0B0 0F1 0B1"))) == [
        "iteration 6000 ms",
        "highest lower bound: d0 (stage 0) computes for 6000 ms, starts at 0 µs at the earliest, "
        "and 0 µs follow: every order of the same work takes at least 6000 ms, which this "
        "iteration reaches",
        "critical path: computation 100.0% (stage 0 on d0)",
        "memory is not a limit for these stages: at the peak any number of further microbatches "
        "could be in flight",
        "bubble 0.0%",
    ]


def test_a_distant_bound_comes_after_the_path() -> None:
    """12 s of which each device computes 6; d1's bound is 1 + 6 + 2 s."""
    said = lines(two_stages())
    assert said[1] == "critical path: computation 100.0% (stage 0 on d0 50.0%; stage 1 on d1 50.0%)"
    assert said[2] == (
        "highest lower bound: d1 (stage 1) computes for 6000 ms, starts at 1000 ms at the "
        "earliest, and 2000 ms follow: every order of the same work takes at least 9000 ms, 25.0% "
        "below this iteration"
    )


def test_a_link_is_named_by_its_ends() -> None:
    """Four transfers of 10 s, two each way: a direction carries 20 s."""
    said = lines(two_stages(bytes_=10 * GIGA))
    assert said[1] == (
        "critical path: transfers 76.9% (d0>d1 38.5%; d1>d0 38.5%), "
        "computation 23.1% (stage 0 on d0 11.5%; stage 1 on d1 11.5%)"
    )
    assert said[2].startswith("highest lower bound: link d0>d1 carries data for 20 s, starts at ")


def test_memory_leads_where_it_binds() -> None:
    """With two microbatches in flight on d0 d1 does not wait: 1 + 2 * 3 + 2 s."""
    assert lines(two_stages(1.5, GIB))[1] == (
        "memory is a limit: at the peak no further microbatch fits on d0; with unlimited "
        "memory a quick schedule of the same stages takes 9000 ms against 10 s, "
        "10.0% less"
    )


def test_room_is_told_where_memory_does_not_bind() -> None:
    assert lines(two_stages(2.5, GIB))[3] == (
        "memory is not a limit for these stages: at the peak at least 1 further microbatch could "
        "be in flight (on d0)"
    )


def test_shares_too_small_to_show_are_left_out(timeline_of) -> None:
    explanation = explain(timeline_of("one_device"))
    shares = [
        PathShare(Spent("computation", ("d0",), (0,)), 1.0, 0.9994),
        PathShare(Spent("transfers", ("a>b",)), 0.0004, 0.0004),
        PathShare(Spent("computation", ("d1",), (1,)), 0.0002, 0.0002),
    ]
    said = explanation_lines(replace(explanation, shares=tuple(shares)))
    assert "critical path: computation 100.0% (stage 0 on d0 99.9%)" in said


def test_a_plan_beyond_memory_is_told_by_how_much() -> None:
    said = lines(two_stages(0.5, GIB))
    assert (
        "the plan exceeds memory: d0 reaches 1 GiB of 512 MiB; `pipeplan verify` refuses it"
    ) in said


def test_reductions_name_their_stages_and_devices() -> None:
    the_graph = graph([layer("a", parameters=["w"])], [], [parameter("w", 10 * GIGA)])
    placed = pipeline(the_graph, star(2), [(["a"], ["d0", "d1"])])
    said = lines(simulate(placed, orders(d0="0F0 0B0", d1="0F1 0B1")))
    path = next(line for line in said if line.startswith("critical path"))
    # 40 s around the ring, 3 s of one microbatch, 0.12 s of SGD.
    assert path == (
        "critical path: all-reduce 92.8% (stage 0 on d0-1), computation 7.0% (stage 0 on d0), "
        "optimizer 0.3% (d0)"
    )


def test_many_shares_and_many_devices_are_summed(timeline_of) -> None:
    explanation = explain(timeline_of("one_device"))
    names = tuple(f"n{index}/gpu0" for index in range(20))
    shares = [PathShare(Spent("computation", (f"d{9 - n}",), (n,)), 1.0, 0.1) for n in range(6)]
    shares.append(PathShare(Spent("all-reduce", names, (0,)), 4.0, 0.4))
    line = next(
        line
        for line in explanation_lines(replace(explanation, shares=tuple(shares)))
        if line.startswith("critical path")
    )
    assert "(stage 0 on d9 10.0%; stage 1 on d8 10.0%; stage 2 on d7 10.0%; 3 others 30.0%)" in line
    assert line.endswith("n15/gpu0, … (20 devices))")


@pytest.mark.parametrize(("count", "rest"), [(3, False), (5, True)])
def test_overflows_are_counted_beyond_a_few(timeline_of, count: int, rest: bool) -> None:
    explanation = explain(timeline_of("one_device"))
    rooms = tuple(MemoryRoom(f"d{n}", 2 * GIB, GIB, GIB) for n in range(count))
    limit = MemoryLimit(rooms, recomputes=False, offloads=False, within_s=1.0, unlimited_s=1.0)
    said = "\n".join(explanation_lines(replace(explanation, memory=limit)))
    assert "d2 reaches 2 GiB of 1 GiB" in said
    assert (", 2 others;" in said) == rest


def test_an_iteration_without_any_time_is_explained() -> None:
    placed = pipeline(graph([layer("a", 0, 0)], []), star(1), [(["a"], ["d0"])])
    said = lines(simulate(placed, orders(d0="0F0 0B0 0F1 0B1")))
    assert any(line.startswith("critical path: the iteration takes no time") for line in said)
    assert said[-1] == "the iteration takes no time (all costs are 0)"


def test_the_data_is_json_and_names_every_event(timeline: Timeline) -> None:
    data = json.loads(json.dumps(explanation_data(explain(timeline)), allow_nan=False))
    assert data["iteration_time_s"] == timeline.iteration_time_s
    ends = [row["end_s"] for row in data["critical_path"]]
    assert ends[-1] == timeline.iteration_time_s
    assert [row["start_s"] for row in data["critical_path"]] == [0, *ends[:-1]]
    assert data["critical_path"][-1]["event"].startswith("optimizer step on d")
    assert data["critical_path"][0]["event"].startswith("0F0 on d")
