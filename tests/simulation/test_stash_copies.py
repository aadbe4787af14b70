"""Stashes on their way to the host and back, whose timelines were worked out by hand."""

from dataclasses import replace

import pytest
from builders import GIGA, boundary, cluster, device_type, graph, layer, link, orders
from builders import pipeline as placed

from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.errors import DeadlockError, PipeplanError
from planner.simulation.critical_path import critical_path
from planner.simulation.noise import Noise, sample_times_s
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


def one_stage(*offload: str, rate: float | None = 1.0) -> PlacedPipeline:
    """Forward 1 s and backward 2 s of two layers together; a stash of 10**9 bytes takes 1 s."""
    rows = [layer("a", 0.5, 1.0, stash_bytes=GIGA), layer("b", 0.5, 1.0, stash_bytes=GIGA)]
    types = {"unit": device_type(memory_gib=100, host_link_gb_per_s=rate)}
    machines = cluster(["d0"], [], types=types)
    found = placed(graph(rows, [boundary("a", "b", bytes_=0)]), machines, [(["a", "b"], ["d0"])])
    return place(found.problem, [StageSpec(("a", "b"), ("d0",), (), offload)])


def copies(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(event.operation): (event.start_s, event.end_s) for event in timeline.copies}


def starts(timeline: Timeline) -> dict[str, float]:
    return {str(event.operation): event.start_s for event in timeline.operations}


def test_stashes_travel_one_at_a_time_and_backwards_wait_for_them() -> None:
    """The first goes out as the second forward begins, which is when it is asked for again."""
    timeline = simulate(one_stage("a"), orders(d0="0F0 0F1 0B0 0B1"))
    assert copies(timeline) == {"0F0": (1, 2), "0B0": (2, 3), "0F1": (3, 4), "0B1": (4, 5)}
    assert starts(timeline) == {"0F0": 0, "0F1": 1, "0B0": 3, "0B1": 5}
    assert timeline.iteration_time_s == 7
    # One stash of b always; of a both while a forward runs or one comes as the other leaves.
    assert timeline.memory["d0"] == [
        (0, 2 * GIGA),
        (1, 4 * GIGA),
        (2, 4 * GIGA),
        (4, 4 * GIGA),
        (5, 2 * GIGA),
        (7, 0),
    ]


def test_the_critical_path_leads_over_the_host_link() -> None:
    timeline = simulate(one_stage("a"), orders(d0="0F0 0F1 0B0 0B1"))
    path = critical_path(timeline)
    assert [(str(getattr(s.event, "operation", "-")), s.waited_for) for s in path[:5]] == [
        ("0F0", "nothing"),
        ("0F0", "device"),
        ("0B0", "host link"),
        ("0B0", "stash"),
        ("0B1", "device"),
    ]
    assert sum(step.seconds for step in path) == timeline.iteration_time_s


def test_while_others_run_a_stash_is_not_held() -> None:
    stage = replace(one_stage("a", "b", rate=4.0), microbatches=3)
    timeline = simulate(stage, orders(d0="0F0 0F1 0F2 0B0 0B1 0B2"))
    assert copies(timeline) == {
        **{"0F0": (1, 1.5), "0F1": (2, 2.5), "0B0": (2.5, 3), "0F2": (3, 3.5)},
        **{"0B1": (3.5, 4), "0B2": (5, 5.5)},
    }
    assert starts(timeline)["0B0"] == 3
    held = dict(timeline.memory["d0"])
    assert (held[1.5], held[2], held[2.5], held[3.5]) == (2 * GIGA, 4 * GIGA, 4 * GIGA, 4 * GIGA)
    assert max(held.values()) == 4 * GIGA


@pytest.mark.parametrize("order", ["0F0 0B0 0F1 0B1", "0F0 0F1 0I0 0I1 0W0 0W1"])
def test_what_is_used_at_once_or_in_halves_stays(order: str) -> None:
    kept, offloaded = (simulate(one_stage(*names), orders(d0=order)) for names in ((), ("a",)))
    assert offloaded.copies == ()
    assert offloaded.memory == kept.memory


def test_a_backward_before_its_forward_deadlocks_as_ever() -> None:
    with pytest.raises(DeadlockError, match="deadlock"):
        simulate(one_stage("a"), orders(d0="0F0 0B1 0F1 0B0"))


def test_a_device_without_a_host_link_copies_nothing() -> None:
    with pytest.raises(PipeplanError, match=r"device_types.unit.host_link_gb_per_s: null, but"):
        simulate(one_stage("a", rate=None), orders(d0="0F0 0F1 0B0 0B1"))


def test_under_noise_backwards_wait_for_their_copies_too() -> None:
    timeline = simulate(one_stage("a"), orders(d0="0F0 0F1 0B0 0B1"))
    assert sample_times_s(timeline, Noise(jitter=0, samples=20)) == pytest.approx(7)
    slow = Noise(jitter=0, samples=20, slow_probability=1, slow_factor=2)
    # Forwards end at 2 and 4; the copies at 3, 4, 5 and 6; backwards at 8 and 12.
    assert sample_times_s(timeline, slow) == pytest.approx(12)


@pytest.mark.parametrize(
    ("offload", "bytes_"),
    [
        ((), 0),
        (("a",), 70),  # The result that it saves itself is used by b.
        (("b",), 50),  # What it saves of a's result is a's too.
        (("a", "b"), 150),  # Of b still all but what c uses too.
        (("a", "b", "c"), 350),  # All but what comes from the stage before.
    ],
)
def test_what_others_hold_too_is_not_offloaded(offload: tuple[str, ...], bytes_: int) -> None:
    """Layers z | a b c: a keeps 100, 30 of it its own result; b 200, of it 150 of a's for c too."""
    rows = [
        layer("z"),
        layer("a", stash_bytes=100 + 20),
        layer("b", stash_bytes=200),
        layer("c", stash_bytes=50),
    ]
    tensors = [
        boundary("z", "a", bytes_=20, saved_by="a"),
        boundary("a", "b", bytes_=30, saved_by="a"),
        boundary("a", "b", "c", bytes_=150, saved_by="b"),
    ]
    machines = cluster(
        ["d0", "d1"],
        [link("d0", "d1")],
        types={"unit": device_type(memory_gib=100, host_link_gb_per_s=1.0)},
    )
    problem = placed(
        graph(rows, tensors), machines, [(["z"], ["d0"]), (["a", "b", "c"], ["d1"])]
    ).problem
    specs = [StageSpec(("z",), ("d0",)), StageSpec(("a", "b", "c"), ("d1",), (), offload)]
    assert place(problem, specs).stages[1].offload_bytes == bytes_
