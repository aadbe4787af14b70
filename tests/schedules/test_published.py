"""Published schedules against torch's own generators, and by what their papers promise."""

from collections.abc import Callable

import pytest
from builders import boundary, graph, layer, pipeline, star
from torch.distributed.pipelining import schedules as torch_schedules

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation, Orders, parse_order
from planner.schedules.assignment import balanced_assignment
from planner.schedules.placements import DoesNotApplyError
from planner.schedules.published import SPLIT, WHOLE, published_orders
from planner.schedules.split import dual_pipe_v, zb_h1, zb_h2, zb_v
from planner.schedules.whole import (
    eager_one_forward_one_backward,
    gpipe,
    interleaved_one_forward_one_backward,
    looped_breadth_first,
    one_forward_one_backward,
)
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def once(devices: int) -> list[int]:
    return list(range(devices))


def loop(devices: int) -> list[int]:
    return [*range(devices)] * 2


def loop_thrice(devices: int) -> list[int]:
    return [*range(devices)] * 3


def v_shape(devices: int) -> list[int]:
    return [*range(devices), *reversed(range(devices))]


def placed(holders: list[int], microbatches: int, forward_s: float = 1) -> PlacedPipeline:
    """Equal stages on devices d0, d1, ...; F, I and W take a second, transfers nothing."""
    rows = [layer(f"l{s}", forward_s, 2 * forward_s) for s in range(len(holders))]
    cuts = [boundary(f"l{s}", f"l{s + 1}", bytes_=0) for s in range(len(holders) - 1)]
    stages = [((f"l{s}",), (f"d{d}",)) for s, d in enumerate(holders)]
    return pipeline(graph(rows, cuts), star(max(holders) + 1), stages, microbatches=microbatches)


def orders_by(generator: Callable, pipe: PlacedPipeline) -> Orders:
    return generator(pipe, balanced_assignment(pipe))


def replayed(generator: Callable, pipe: PlacedPipeline) -> Timeline:
    return simulate(pipe, orders_by(generator, pipe))


def in_flight(pipe: PlacedPipeline, order: list[Operation], release: str) -> int:
    """The most microbatches of its stages that a device holds at once."""
    held, most = 0, 0
    for operation in order:
        held += (operation.kind == "F") - (operation.kind in release)
        most = max(most, held)
    return most


# --- torch as an oracle ---------------------------------------------------------------------------


def by_torch(name: str, rank: int, devices: int, chunks: int, microbatches: int) -> list[str]:
    """What torch's schedule would run on a rank, without the processes it needs to run it."""
    kind = getattr(torch_schedules, name)
    made = object.__new__(kind)
    made.pp_group_size, made.rank = devices, rank
    made._n_microbatches, made.n_local_stages = microbatches, chunks
    made._num_stages = made.num_stages = devices * chunks
    made.number_of_rounds = max(1, microbatches // devices)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    made.pipeline_order, made._stages = {}, [None] * chunks
    return _flat(made._calculate_single_rank_operations(rank))


def _flat(actions: list) -> list[str]:
    words = []
    for action in actions:
        if action is not None and action.sub_actions:
            words += _flat(action.sub_actions)
        elif action is not None:
            letter = LETTERS[action.computation_type.name]
            words.append(f"{action.stage_index}{letter}{action.microbatch_index}")
    return words


def _from_the_other_end(word: str, microbatches: int) -> str:
    stage, kind, microbatch = parse_order(word, "")[0]
    return f"{stage}{kind}{microbatches - 1 - microbatch}" if kind == "B" else word


@pytest.mark.parametrize("devices", [2, 3, 4, 7])
@pytest.mark.parametrize(
    ("generator", "name", "holders", "rounds"),
    [
        (looped_breadth_first, "ScheduleLoopedBFS", loop, 1),
        (interleaved_one_forward_one_backward, "ScheduleInterleaved1F1B", loop, 1),
        (interleaved_one_forward_one_backward, "ScheduleInterleaved1F1B", loop_thrice, 3),
        (zb_h1, "ScheduleInterleavedZeroBubble", once, 2),
        (zb_v, "ScheduleZBVZeroBubble", v_shape, 2),
        (zb_v, "ScheduleZBVZeroBubble", v_shape, 3),
        (dual_pipe_v, "ScheduleDualPipeV", v_shape, 2),
        (dual_pipe_v, "ScheduleDualPipeV", v_shape, 3),
    ],
)
def test_every_order_is_torchs_own(
    generator: Callable, name: str, holders: Callable, rounds: int, devices: int
) -> None:
    microbatches = rounds * devices
    pipe = placed(holders(devices), microbatches)
    orders = orders_by(generator, pipe)
    chunks = len(pipe.stages) // devices
    for rank in range(devices):
        ours = [str(operation) for operation in orders[f"d{rank}"]]
        theirs = by_torch(name, rank, devices, chunks, microbatches)
        if generator is looped_breadth_first:
            # Torch goes back through the microbatches from the last, the paper from the first.
            theirs = [_from_the_other_end(word, microbatches) for word in theirs]
        assert ours == theirs


# --- what the papers promise, all operations a second long ----------------------------------------


@pytest.mark.parametrize(("devices", "count"), [(2, 4), (4, 8), (4, 13), (8, 24)])
def test_with_equal_times_bubbles_are_as_published(devices: int, count: int) -> None:
    work, bubble = 3 * count, devices - 1
    pipe = placed(once(devices), count)
    assert replayed(gpipe, pipe).iteration_time_s == work + 3 * bubble
    assert replayed(one_forward_one_backward, pipe).iteration_time_s == work + 3 * bubble
    assert replayed(eager_one_forward_one_backward, pipe).iteration_time_s == work + 3 * bubble
    assert replayed(zb_h1, pipe).iteration_time_s == work + bubble
    # From a stage's first operation to its last there is no bubble at all.
    spans = [
        max(e.end_s for e in mine) - min(e.start_s for e in mine)
        for device in pipe.devices
        if (mine := [e for e in replayed(zb_h2, pipe).operations if e.device == device])
    ]
    assert max(spans) == work


@pytest.mark.parametrize(("devices", "rounds"), [(2, 2), (4, 1), (4, 3), (8, 2)])
def test_interleaving_divides_the_bubble(devices: int, rounds: int) -> None:
    count = rounds * devices
    pipe = placed(loop(devices), count, forward_s=0.5)
    made = replayed(interleaved_one_forward_one_backward, pipe)
    assert made.iteration_time_s == 3 * count + 3 * (devices - 1) / 2


@pytest.mark.parametrize(("devices", "count"), [(2, 4), (4, 8), (4, 20)])
def test_zb_v_keeps_devices_busy_in_the_memory_of_1f1b(devices: int, count: int) -> None:
    pipe = placed(v_shape(devices), count)
    orders = orders_by(zb_v, pipe)
    assert simulate(pipe, orders).iteration_time_s == 6 * count + devices - 1
    assert all(in_flight(pipe, list(order), "W") <= 2 * devices for order in orders.values())


@pytest.mark.parametrize(("devices", "count"), [(2, 4), (4, 8), (4, 13)])
def test_microbatches_in_flight_are_as_published(devices: int, count: int) -> None:
    pipe = placed(once(devices), count)
    for generator, release, most in (
        (one_forward_one_backward, "B", lambda stage: devices - stage),
        (eager_one_forward_one_backward, "B", lambda stage: 2 * (devices - stage) - 1),
        (zb_h1, "W", lambda stage: devices),
        (zb_h2, "W", lambda stage: 2 * devices - 1),
    ):
        for stage, order in enumerate(orders_by(generator, pipe).values()):
            assert in_flight(pipe, list(order), release) == min(count, most(stage))


# --- where they apply -----------------------------------------------------------------------------


@pytest.mark.parametrize("holders", [once(3), loop(3), v_shape(3), [0, 1, 1, 0, 2]])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
@pytest.mark.parametrize("split", [False, True])
def test_whatever_applies_runs_every_operation_once(
    holders: list[int], count: int, split: bool
) -> None:
    pipe = placed(holders, count)
    names = set()
    for name, orders in published_orders(pipe, balanced_assignment(pipe), split=split):
        names.add(name)
        ran = [operation for order in orders.values() for operation in order]
        assert len(ran) == len(set(ran))
        kinds = {
            (s, m): {op.kind for op in ran if (op.stage, op.microbatch) == (s, m)}
            for s in range(len(holders))
            for m in range(count)
        }
        assert all(found in ({"F", "B"}, {"F", "I", "W"}) for found in kinds.values())
        assert simulate(pipe, orders).iteration_time_s >= 3
    assert ("gpipe" in names) == (holders == once(3))
    assert ("looped breadth first" in names) != ("gpipe" in names)
    assert names <= {*WHOLE, *(SPLIT if split else ())}


def test_what_is_not_defined_says_so() -> None:
    with pytest.raises(DoesNotApplyError, match="several stages"):
        orders_by(one_forward_one_backward, placed(loop(2), 4))
    with pytest.raises(DoesNotApplyError, match="several times"):
        orders_by(interleaved_one_forward_one_backward, placed(v_shape(2), 4))
    with pytest.raises(DoesNotApplyError, match="down the devices and up again"):
        orders_by(zb_v, placed(loop(2), 4))
    with pytest.raises(DoesNotApplyError, match="fewer than 6 microbatches"):
        orders_by(dual_pipe_v, placed(v_shape(3), 5))
    stages = [(["a"], ["d0", "d1"]), (["b"], ["d2"])]
    with pytest.raises(DoesNotApplyError, match="replicas"):
        orders_by(zb_h1, pipeline(graph([layer("a"), layer("b")]), star(3), stages))
