"""Bounds and searched schedules of given stages against the best of all orders."""

import random
from dataclasses import dataclass, field, replace

import pytest
from builders import boundary, graph, layer, orders, pipeline, star
from hypothesis import given
from hypothesis import strategies as st
from schedule_brute_force import brute_force, brute_force_of_any_halves, fits
from strategies import orders_for, partitions, problems
from tiny_pipelines import SHAPES, TinyPipeline, draw_tiny

from planner import InfeasibleError, PipeplanError
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.plan.operations import Operation
from planner.search.budget import Clock, Settings
from planner.search.schedule.classics import one_by_one, split_backwards
from planner.search.schedule.cp_sat.model import ScheduleModel
from planner.search.schedule.heuristic import Schedule
from planner.search.schedule.measure import Measure, measure_bound_s, measured_s
from planner.search.schedule.search import schedule_pipeline, search_schedule
from planner.search.schedule.solve import ScheduleTask, improve_schedule
from planner.search.schedule.ticks import in_ticks
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.space import Backward
from planner.verification import verify

MEASURES: tuple[Measure, ...] = ("makespan", "longest_stage_span")
SETTINGS = Settings(seed=0, workers=1, deterministic=True)
A_LITTLE = 1 + 1e-9
OWNER = {(0, 0): "d0", (0, 1): "d1"}
"""Two replicas in turn."""


def searched(tiny: TinyPipeline, measure: Measure, backward: Backward) -> Schedule:
    clock = Clock(3, deterministic=True)
    return schedule_pipeline(tiny.placed, ScheduleTask(SETTINGS, clock, measure, backward))


def starts(timeline: Timeline) -> dict[tuple, float]:
    return {tuple(event.operation): event.start_s for event in timeline.operations}


def check(tiny: TinyPipeline, split: bool) -> list[bool]:
    """Bound, lower bound, least and value in this order; of each value whether it was proved."""
    proved = []
    best = brute_force(tiny, split=split)
    backward: Backward = "split" if split else "whole"
    # Where the job allows both kinds, some stages of a split schedule are left whole.
    tiny = replace(tiny, backward=backward)
    for measure, least in zip(MEASURES, (best.makespan, best.longest_span), strict=True):
        assert measure_bound_s(tiny.placed, measure, split=split) <= least * A_LITTLE
        if least == float("inf"):
            with pytest.raises(InfeasibleError):
                searched(tiny, measure, backward)
            continue
        found = searched(tiny, measure, backward)
        value = measured_s(found.timeline, measure)
        assert found.lower_bound_s <= least * A_LITTLE
        assert least <= value * A_LITTLE
        assert simulate(tiny.placed, found.orders) == found.timeline
        assert fits(tiny, starts(found.timeline))
        assert verify(plan_by_hand(tiny.placed, found.orders)) == []
        proved.append(value <= found.lower_bound_s * A_LITTLE)
        if proved[-1]:
            assert value == pytest.approx(least, rel=1e-9)
    return proved


@pytest.mark.extensive
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bound_and_value_enclose_the_best_of_all_orders(shape):
    device, microbatches, split = shape
    proved = []
    for seed in range(12):
        rng = random.Random(seed)
        tiny = draw_tiny(rng, device, microbatches, optimizer=seed % 3 == 0)
        proved += check(tiny, split)
    assert sum(proved) >= 0.5 * len(proved) > 0


@pytest.mark.parametrize(
    ("device", "microbatches"), [((0,), 2), ((0,), 3), ((0, 1), 1), ((0, 1), 2), ((0, 1, 2), 1)]
)
def test_bound_and_value_enclose_the_best_choice_of_halves(device, microbatches):
    best_found = 0
    for seed in range(8):
        rng = random.Random(seed)
        tiny = draw_tiny(rng, device, microbatches)
        saved = [rng.randint(0, w + 1) for w in tiny.weight_gradient]
        least_s = [min(i + w - 1, x) for i, w, x in zip(*_gradients(tiny), saved, strict=True)]
        # Halves that need more memory than the whole are not joined for its sake.
        late = [min(pair) for pair in zip(tiny.kept, tiny.kept_for_weights, strict=True)]
        tiny = replace(tiny, saved=[max(0, x) for x in least_s], kept_for_weights=late)
        best = brute_force_of_any_halves(tiny)
        for measure, least in zip(MEASURES, (best.makespan, best.longest_span), strict=True):
            assert measure_bound_s(tiny.placed, measure, split=True) <= least * A_LITTLE
            if least == float("inf"):
                continue
            found = searched(tiny, measure, "any")
            value = measured_s(found.timeline, measure)
            assert found.lower_bound_s <= least * A_LITTLE
            assert least <= value * A_LITTLE
            assert simulate(tiny.placed, found.orders) == found.timeline
            assert verify(plan_by_hand(tiny.placed, found.orders)) == []
            best_found += value <= least * A_LITTLE
    assert best_found >= 12


def _gradients(tiny: TinyPipeline) -> tuple[list[int], list[int]]:
    return [*tiny.input_gradient], [*tiny.weight_gradient]


@pytest.mark.extensive
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bound_and_value_enclose_the_best_with_tensors_on_their_way(shape):
    device, microbatches, split = shape
    for seed in range(6):
        check(draw_tiny(random.Random(100 + seed), device, microbatches, buffers=True), split)


@pytest.mark.extensive
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bound_and_value_enclose_the_best_where_operations_may_take_no_time(shape):
    device, microbatches, split = shape
    for seed in range(6):
        check(draw_tiny(random.Random(200 + seed), device, microbatches, zeros=True), split)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", [((0, 1), 2, True), ((0, 1), 3, False), ((0, 1, 0), 2, False)])
def test_running_microbatches_in_order_loses_nothing(seed, shape):
    device, microbatches, split = shape
    tiny = draw_tiny(random.Random(seed), device, microbatches)
    kept = brute_force(tiny, split=split)
    free = brute_force(tiny, split=split, any_order=True)
    assert free.tried > kept.tried
    assert (free.makespan, free.longest_span) == (kept.makespan, kept.longest_span)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", [((0, 1), 2, True), ((0, 1), 3, False), ((0, 1, 0), 2, False)])
def test_bounds_hold_for_microbatches_out_of_order(seed, shape):
    """Another order may start operations later, which leaves more room for tensors on their way."""
    device, microbatches, split = shape
    tiny = draw_tiny(random.Random(seed), device, microbatches, buffers=True)
    best = brute_force(tiny, split=split, any_order=True)
    for measure, least in zip(MEASURES, (best.makespan, best.longest_span), strict=True):
        assert measure_bound_s(tiny.placed, measure, split=split) <= least * A_LITTLE
        if least < float("inf"):
            try:
                assert (
                    searched(tiny, measure, "split" if split else "whole").lower_bound_s
                    <= least * A_LITTLE
                )
            except InfeasibleError:
                assert brute_force(tiny, split=split).makespan == float("inf")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("measure", MEASURES)
def test_more_memory_never_worsens_a_proved_optimum(measure, seed):
    drawn = draw_tiny(random.Random(seed), (0, 1, 2), 4)
    tiny = replace(
        drawn, kept_for_weights=[min(k) for k in zip(drawn.kept, (1, 2, 1), strict=True)]
    )
    least = float("inf")
    for more in range(0, 12, 2):
        roomy = replace(tiny, room=[room + more for room in tiny.room])
        found = searched(roomy, measure, "any")
        value = measured_s(found.timeline, measure)
        if value <= found.lower_bound_s * A_LITTLE:
            assert value <= least * A_LITTLE
            least = value
        assert found.lower_bound_s <= least * A_LITTLE


# Operations of no length beside others at the same moment: drawn at random, all had lost the best.
NO_LENGTH = [
    TinyPipeline(
        forward=[3, 2, 0],
        input_gradient=[2, 3, 0],
        weight_gradient=[0, 0, 0],
        send=[0, 0],
        kept=[2, 3, 3],
        kept_for_weights=[0, 4, 4],
        cut=[0, 0],
        device=(0, 1, 0),
        room=(13, 4),
        optimizer=(0, 0),
        microbatches=2,
    ),
    TinyPipeline(
        forward=[3, 4, 3, 1],
        input_gradient=[3, 2, 0, 3],
        weight_gradient=[4, 0, 0, 3],
        send=[0, 0, 0],
        kept=[1, 3, 2, 3],
        kept_for_weights=[1, 4, 2, 1],
        cut=[0, 0, 0],
        device=(0, 1, 1, 0),
        room=(4, 15),
        optimizer=(0, 0),
        microbatches=2,
    ),
]


@pytest.mark.parametrize("tiny", NO_LENGTH)
def test_operations_of_no_length_run_in_an_order_that_can_be_replayed(tiny):
    best = brute_force(tiny, split=False)
    found = searched(tiny, "makespan", "whole")
    assert found.iteration_time_s == best.makespan == found.lower_bound_s


def test_no_bound_rests_on_memory_that_is_held_for_no_time():
    """The last stage's stash never counts: its forward and its gradient take no time."""
    tiny = TinyPipeline(
        forward=[3, 0, 0],
        input_gradient=[0, 3, 0],
        weight_gradient=[3, 3, 0],
        send=[2, 0],
        kept=[2, 2, 1],
        kept_for_weights=[2, 2, 1],
        cut=[0, 0],
        device=(0, 1, 2),
        room=(4, 5, 0),
        optimizer=(0, 0, 0),
        microbatches=2,
    )
    assert brute_force(tiny, split=False).makespan == 22
    check(tiny, split=False)


@pytest.mark.parametrize("measure", MEASURES)
def test_start_that_turns_microbatches_round_gives_no_bound_that_is_too_high(measure):
    tiny = TinyPipeline(
        forward=(1, 1),
        input_gradient=(2, 1),
        weight_gradient=(2, 0),
        send=(0,),
        kept=(1, 1),
        kept_for_weights=(1, 1),
        cut=(0,),
        device=(0, 1),
        room=(9, 9),
        optimizer=(0, 0),
        microbatches=3,
    )
    reverse = orders(d0="0F0 0F1 0F2 0B2 0B1 0B0", d1="1F0 1F1 1F2 1B2 1B1 1B0")
    start = Schedule(reverse, simulate(tiny.placed, reverse), "reverse")
    best = brute_force(tiny, split=False)
    found = improve_schedule(
        tiny.placed, start, ScheduleTask(SETTINGS, Clock(10, True), measure), 10
    )
    assert best.makespan == best.longest_span == 15
    assert found.lower_bound_s <= 15


def test_spans_are_searched_where_transfers_and_gradients_are_shorter_than_a_tick():
    layers = [layer("l0"), layer("l1"), layer("l2", 1, 1e-5), layer("l3", 1, 0)]
    cuts = [boundary(f"l{s}", f"l{s + 1}", bytes_=1000) for s in range(3)]
    stages = [((f"l{s}",), (f"d{s}",)) for s in range(4)]
    placed = pipeline(graph(layers, cuts), star(4, duplex="half"), stages, microbatches=3)
    clock = Clock(5, True)
    found = schedule_pipeline(placed, ScheduleTask(SETTINGS, clock, "longest_stage_span", "any"))
    assert found.lower_bound_s <= measured_s(found.timeline, "longest_stage_span")


# --- replicas, tied parameters, shared devices: bounds under random schedules -------------------


@dataclass(frozen=True)
class Capped(PlacedPipeline):
    """Every device has as much memory as is told."""

    capped_bytes: dict[str, int] = field(kw_only=True)

    def capacity_bytes(self, device: str) -> int:
        return self.capped_bytes[device]


def capped(timeline: Timeline) -> Capped:
    """The pipeline of a replay with no more memory than it takes."""
    fields = {name: getattr(timeline.pipeline, name) for name in FIELDS}
    return Capped(**fields, capped_bytes=timeline.peak_memory_bytes)


FIELDS = ("problem", "stages", "synchronisations", "optimizer_s", "microbatches")


def weights_later(draw, order: list[Operation]) -> list[Operation]:
    """An order of whole backwards with weight gradients apart, each at any later place."""
    apart = split_backwards(order)
    for operation in [op for op in apart if op.kind == "W"]:
        since = apart.index(operation)
        apart.remove(operation)
        apart.insert(draw(st.integers(since, len(apart))), operation)
    return apart


@given(st.data(), st.booleans())
def test_bounds_hold_for_random_schedules_in_the_memory_they_take(data, split):
    problem = data.draw(problems())
    placed = place(problem, data.draw(partitions(problem)))
    drawn = data.draw(orders_for(placed, split_backwards=False))
    if split:
        drawn = {device: weights_later(data.draw, order) for device, order in drawn.items()}
    timeline = simulate(placed, drawn)
    tight = capped(timeline)
    for measure in MEASURES:
        bound_s = measure_bound_s(tight, measure, split=split)
        assert bound_s <= measured_s(timeline, measure) * A_LITTLE


@given(st.data(), st.booleans())
def test_bounds_hold_for_random_schedules_of_stages_alone(data, split):
    problem = data.draw(problems(min_devices=3))
    specs = data.draw(partitions(problem, replicas=False))
    names = problem.cluster.device_names
    rest = tuple(name for spec in specs[len(names) - 1 :] for name in spec.layers)
    first = specs[: len(names) - 1]
    stages = [*first, StageSpec(rest, ())] if rest else first
    alone = zip(stages, names, strict=False)
    placed = place(problem, [replace(stage, devices=(name,)) for stage, name in alone])
    drawn = data.draw(orders_for(placed, split_backwards=False))
    if split:
        drawn = {device: weights_later(data.draw, order) for device, order in drawn.items()}
    timeline = simulate(placed, drawn)
    tight = capped(timeline)
    for measure in MEASURES:
        bound_s = measure_bound_s(tight, measure, split=split)
        assert bound_s <= measured_s(timeline, measure) * A_LITTLE


@pytest.mark.parametrize(("backward_s", "is_exact"), [(None, True), (2.5, False)])
def test_replicas_whose_whole_backward_is_quicker_prove_nothing_split(backward_s, is_exact):
    times = {"forward_s": 1, "input_gradient_s": 2, "weight_gradient_s": 1}
    row = layer("a", measured={"unit": {**times, "backward_s": backward_s}})
    placed = pipeline(graph([row]), star(2), [(["a"], ["d0", "d1"])], microbatches=2)
    ticks = in_ticks(placed)
    split = {d: split_backwards(order) for d, order in one_by_one(placed, OWNER).items()}
    model = ScheduleModel(ticks, simulate(ticks, split), OWNER, free=True, backward="any")
    assert model.is_exact is is_exact


def test_a_measure_that_there_is_not_is_refused():
    placed = pipeline(graph([layer("only")]), star(1), [(("only",), ("d0",))])
    specs = [stage.spec for stage in placed.stages]
    with pytest.raises(PipeplanError, match="measure: 'speed' is not one of makespan"):
        search_schedule(placed.problem, specs, measure="speed")
