"""Microbatches of several lengths: their figures, times of iterations, and the choice of order."""

import json
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from builders import GIGA, star
from hypothesis import given
from hypothesis import strategies as st
from unequal_graphs import SHARES, TOKENS, unequal

from models import ZOO
from planner import Job, PipeplanError, Problem, solve, verify
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.lengths import ORDERS, Lengths
from planner.model.figures import PHASES
from planner.model.graph_record import GraphRecord
from planner.model.layer_graph import LayerGraph
from planner.model.length_graph import record_at
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.report.summary import length_lines
from planner.search.microbatches import in_proportion
from planner.simulation.lengths import estimated_times, placed_by_length, predicted_by_length
from planner.simulation.simulator import simulate, simulate_plan
from planner.tracing.trace import trace
from planner.units import format_seconds

TRACED = {"tokens": (8, 24, 64), "shares": (0.5, 0.3, 0.2)}


def measured_instead(the_graph: LayerGraph, seconds: list[list[tuple[float, float]]]) -> LayerGraph:
    """The same times, measured on the devices' type, of layers whose FLOPs take ten times as long.

    Whole backwards take what they take; their halves would take longer.
    """
    data = the_graph.record.model_dump(mode="json")
    for layer, of_layer in zip(data["layers"], seconds, strict=True):
        for row, (forward_s, backward_s) in zip(layer["lengths"], of_layer, strict=True):
            times = {"forward_s": forward_s, "backward_s": backward_s}
            times |= {"input_gradient_s": backward_s, "weight_gradient_s": backward_s}
            row["measured"] = {"unit": times}
            for work in row["work"]:
                work["flops"] *= 10
        longest = layer["lengths"][-1]
        layer.update(work=longest["work"], measured=longest["measured"])
        layer.update({f"{phase}_flops": 10 * layer[f"{phase}_flops"] for phase in PHASES})
    return LayerGraph.parse(data)


def job(microbatches: int, **lengths: object) -> Job:
    return Job.model_validate(
        {
            "optimizer": "sgd",
            "microbatches": microbatches,
            "backward": "whole",
            "lengths": {"tokens": TOKENS, "shares": SHARES, **lengths},
        }
    )


def two_stages(the_graph: LayerGraph, the_job: Job) -> PlacedPipeline:
    names = list(the_graph.layers)
    stages = [StageSpec((name,), (f"d{k}",)) for k, name in enumerate(names)]
    return place(Problem(the_graph, star(len(names)), the_job), stages)


def orders_of(microbatches: int, warm_up: int) -> dict[str, list[Operation]]:
    """1F1B with more or fewer forwards ahead on the first of two devices."""
    first = [Operation(0, "F", m) for m in range(min(warm_up, microbatches))]
    for m in range(microbatches):
        first.append(Operation(0, "B", m))
        if m + warm_up < microbatches:
            first.append(Operation(0, "F", m + warm_up))
    second = [Operation(1, kind, m) for m in range(microbatches) for kind in "FB"]
    return {"d0": first, "d1": second}


def longest_path_s(
    orders: dict[str, list[Operation]],
    seconds: list[list[tuple[float, float]]],
    message_s: list[float],
    lengths: tuple[int, ...],
) -> float:
    """The recurrence of two devices: each operation after its device's last and its message."""
    ends: dict[Operation, float] = {}
    free, line = dict.fromkeys(orders, 0.0), dict.fromkeys("FB", 0.0)
    arrived: dict[Operation, float] = {}
    left = {device: list(order) for device, order in orders.items()}
    while any(left.values()):
        for device, order in left.items():
            if not order:
                continue
            stage, kind, m = operation = order[0]
            needs = (stage, kind) in ((1, "F"), (0, "B"))
            if needs and operation not in arrived:
                continue
            begin = max(free[device], arrived.get(operation, 0.0))
            ends[operation] = free[device] = begin + seconds[stage][lengths[m]][kind == "B"]
            order.pop(0)
            if (stage, kind) in ((0, "F"), (1, "B")):
                line[kind] = max(line[kind], ends[operation]) + message_s[lengths[m]]
                arrived[Operation(1 - stage, kind, m)] = line[kind]
    return max(ends.values())


TIMES = st.floats(0.25, 4).map(lambda x: round(x, 3))
ROWS = st.lists(st.tuples(TIMES, TIMES), min_size=3, max_size=3)


@given(
    seconds=st.lists(ROWS, min_size=2, max_size=2),
    message_gb=st.lists(st.floats(0.01, 2).map(lambda x: round(x, 3)), min_size=3, max_size=3),
    microbatches=st.integers(1, 5),
    warm_up=st.integers(1, 5),
    order=st.sampled_from(ORDERS),
    is_measured=st.booleans(),
)
def test_times_of_iterations_are_those_of_their_own_microbatches(
    seconds: list,
    message_gb: list[float],
    microbatches: int,
    warm_up: int,
    order: str,
    is_measured: bool,
) -> None:
    message_gb = sorted(message_gb)
    the_job = job(microbatches, iterations=20, order=order)
    the_graph = unequal(seconds, message_gb)
    if is_measured:
        the_graph = measured_instead(the_graph, seconds)
    pipeline = two_stages(the_graph, the_job)
    orders = orders_of(microbatches, warm_up)
    timeline = simulate(pipeline, orders)
    found = predicted_by_length(timeline)
    times_s = [
        longest_path_s(orders, seconds, message_gb, row)
        for row in the_job.lengths.of_iterations(microbatches)
    ]
    assert found.iterations == 20
    assert found.expected_s == pytest.approx(np.mean(times_s))
    assert found.percentile_95_s == pytest.approx(np.percentile(times_s, 95))
    assert found.worst_s == pytest.approx(max(times_s))
    estimate = estimated_times(timeline, placed_by_length(pipeline), the_job.lengths)
    assert estimate.expected_s == pytest.approx(found.expected_s)
    assert estimate.percentile_95_s == pytest.approx(found.percentile_95_s)
    assert verify(plan_by_hand(pipeline, orders)) == []


@given(
    seconds=st.lists(ROWS, min_size=2, max_size=3),
    message_gb=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
)
def test_no_plan_takes_less_than_the_bound_in_the_expectation(
    seconds: list, message_gb: list[float]
) -> None:
    """Over all draws, each as likely as its shares say, not over a sample of them."""
    the_graph = unequal(seconds, sorted(message_gb))
    the_job = job(2, iterations=20, order="drawn")
    problem = Problem(the_graph, star(2), the_job)
    result = solve(problem, time_limit_s=0.3, deterministic=True)
    timeline = simulate_plan(result.plan)
    placed = placed_by_length(timeline.pipeline)
    expected_s = 0.0
    for row in product(range(3), repeat=2):
        by_microbatch = [placed[k] for k in row]
        time_s = simulate(timeline.pipeline, timeline.orders, by_microbatch).iteration_time_s
        expected_s += np.prod([SHARES[k] for k in row]) * time_s
    assert expected_s >= result.lower_bound_s * (1 - 1e-9)


def test_stages_hold_what_the_longest_does_and_send_the_mean() -> None:
    pipeline = two_stages(unequal([[(1, 2), (2, 4), (5, 9)]] * 2, [1, 2, 6], stash=7), job(2))
    longest = placed_by_length(pipeline)[-1]
    for here, there in zip(pipeline.stages, longest.stages, strict=True):
        assert here.stash_bytes == there.stash_bytes
        assert here.output_bytes == there.output_bytes
    mean = (0.5 * 1 + 0.3 * 2 + 0.2 * 6) * GIGA
    assert mean - 1 <= pipeline.stages[0].sent_bytes <= mean
    assert pipeline.seconds(0, "F", "d0") == pytest.approx(0.5 * 1 + 0.3 * 2 + 0.2 * 5)
    assert pipeline.seconds(1, "B", "d1") == pytest.approx(0.5 * 2 + 0.3 * 4 + 0.2 * 9)


# --- a plan ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned() -> Plan:
    seconds = [[(0.2, 0.4), (0.5, 1.0), (3.0, 6.0)]] * 4
    problem = Problem(unequal(seconds, [0.01, 0.02, 0.04]), star(4), job(6))
    return solve(problem, time_limit_s=1, deterministic=True).plan


def test_a_plan_says_the_order_that_is_best_of_all(planned: Plan) -> None:
    assert planned.job.lengths.order in ORDERS
    timeline, lengths = simulate_plan(planned), planned.job.lengths
    placed = placed_by_length(timeline.pipeline)
    of_order = {
        order: estimated_times(timeline, placed, lengths.model_copy(update={"order": order})).rank_s
        for order in ORDERS
    }
    assert of_order[lengths.order] == min(of_order.values())


@pytest.mark.parametrize("field", ["iterations", "expected_s", "percentile_95_s", "worst_s"])
def test_other_times_than_those_of_a_replay_are_refused(planned: Plan, field: str) -> None:
    assert verify(planned) == []
    times = planned.predicted.lengths
    wrong = times.model_copy(update={field: type(getattr(times, field))(21)})
    predicted = planned.predicted.model_copy(update={"lengths": wrong})
    [problem] = verify(planned.model_copy(update={"predicted": predicted}))
    assert problem.startswith(f"predicted.lengths.{field}: the plan says 21")


def test_a_plan_without_its_times_is_refused(planned: Plan) -> None:
    predicted = planned.predicted.model_copy(update={"lengths": None})
    [problem] = verify(planned.model_copy(update={"predicted": predicted}))
    assert problem.startswith("predicted.lengths: the plan says nothing of it, a simulation gives")


def test_a_plan_survives_a_file(planned: Plan, tmp_path: Path) -> None:
    planned.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == planned


def test_tables_say_what_the_times_are_of(planned: Plan) -> None:
    times = planned.predicted.lengths
    line, explained = length_lines(planned)
    assert f"expected {format_seconds(times.expected_s)}" in line
    assert f"95th percentile {format_seconds(times.percentile_95_s)}" in line
    assert "10 tokens 50%, 20 tokens 30%, 40 tokens 20%" in line
    assert "the mean iteration" in explained


# --- the layer graph ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_tiny", "t5_tiny"])
def test_a_graph_of_lengths_has_the_figures_of_a_trace_at_each(name: str) -> None:
    def traced(length: int, **fields: object) -> GraphRecord:
        entry = {"shape": (length,), "dtype": "int64", "below": 9}
        names = ["ids", "target"] if name == "llama_tiny" else ["ids", "decoder_ids", "target"]
        inputs, few = dict.fromkeys(names, entry), {"model_arguments": {"layers": 1}}
        return trace(ZOO[name], Job.model_validate({**few, "inputs": inputs, **fields})).record

    record = traced(64, lengths=TRACED)
    for number, tokens in enumerate(TRACED["tokens"]):
        of_length, alone = record_at(record, number), traced(tokens)
        for here, there in zip(of_length.layers, alone.layers, strict=True):
            for field in ("name", "work", "batch_bytes", "products", "forward_flops"):
                assert getattr(here, field) == getattr(there, field), (field, here.name)
        assert [t.bytes for t in of_length.boundaries] == [t.bytes for t in alone.boundaries]
        # Room is made for the longest.
        assert [x.stash_bytes for x in of_length.layers] == [x.stash_bytes for x in record.layers]


def test_microbatches_of_more_samples_scale_at_every_length() -> None:
    the_graph = unequal([[(1, 2), (2, 4), (5, 9)]] * 2, [1, 2, 6], stash=7)
    twice = LayerGraph.parse(in_proportion(the_graph, 2).record.model_dump(mode="json")).record
    for before, after in zip(the_graph.record.layers, twice.layers, strict=True):
        for one, two in zip(before.lengths, after.lengths, strict=True):
            assert [row.flops for row in two.work] == [2 * row.flops for row in one.work]
    for one, two in zip(the_graph.record.boundaries, twice.boundaries, strict=True):
        assert [row.bytes for row in two.lengths] == [2 * row.bytes for row in one.lengths]


# --- lengths --------------------------------------------------------------------------------------


def test_lengths_are_drawn_by_their_shares_and_always_the_same() -> None:
    lengths = Lengths(tokens=TOKENS, shares=SHARES, seed=3, iterations=1000)
    drawn = Counter(k for row in lengths.of_iterations(8) for k in row)
    assert [drawn[k] / 8000 for k in range(3)] == pytest.approx(SHARES, abs=0.02)
    assert lengths.of_iteration(1000, 8) == list(lengths.of_iterations(8))[-1]
    other = lengths.model_copy(update={"seed": 4})
    assert other.of_iteration(1, 8) != lengths.of_iteration(1, 8)


def test_a_trace_comes_over_and_over_and_counts_up_to_the_next_length() -> None:
    lengths = Lengths(tokens=(10, 20, 40), trace=(1, 10, 11, 20, 40))
    assert lengths.all_shares == (2 / 5, 2 / 5, 1 / 5)
    assert [lengths.of_iteration(k, 3) for k in (1, 2, 3)] == [(0, 0, 1), (1, 2, 0), (0, 1, 1)]


def test_sorted_microbatches_are_the_drawn_ones() -> None:
    drawn = Lengths(tokens=TOKENS, shares=SHARES)
    for order, is_falling in (("longest_first", True), ("shortest_first", False)):
        ordered = drawn.model_copy(update={"order": order})
        for there, here in zip(drawn.of_iterations(7), ordered.of_iterations(7), strict=True):
            assert Counter(here) == Counter(there)
            assert all(a >= b if is_falling else a <= b for a, b in pairwise(here))


def test_a_job_names_a_file_of_token_counts(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("10 9\n33\n20\n")
    data = {"format": "pipeplan-job/1", "lengths": {"tokens": [10, 20, 40]}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(data | {"lengths": data["lengths"] | {"trace_file": "trace.txt"}}))
    assert Job.load(path).lengths.trace == (10, 9, 33, 20)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"tokens": [20, 10], "shares": [0.5, 0.5]}, "tokens: .* do not ascend; sort them"),
        ({"tokens": [10, 20]}, "shares and trace: none is given"),
        ({"tokens": [10, 20], "shares": [0.5, 0.5], "trace": [1]}, "both are given"),
        ({"tokens": [10, 20], "shares": [1.0]}, "1 shares for 2 tokens"),
        ({"tokens": [10, 20], "shares": [0.5, 0.6]}, "sum is 1.1, expected 1"),
        ({"tokens": [10, 20], "trace": [10, 21]}, "of 21 tokens, but the longest .* is 20"),
        ({"tokens": [10, 20], "trace": [20, 20]}, "no microbatch of 10 tokens"),
        ({"tokens": [10, 20], "shares": [0.5, 0.5], "order": "random"}, "order"),
        ({"tokens": [10, 20], "trace_file": "none.txt"}, "none.txt cannot be read"),
        ({"tokens": [10, 20], "trace_file": "words.txt"}, "has .many., expected whole numbers"),
        ({"tokens": [10, 20], "trace_file": "empty.txt"}, "has nothing, expected whole numbers"),
    ],
)
def test_wrong_lengths_are_named(table: dict, words: str, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("10 many")
    (tmp_path / "empty.txt").write_text("")
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"format": "pipeplan-job/1", "lengths": table}))
    with pytest.raises(PipeplanError, match=words):
        Job.load(path)


def test_lengths_that_do_not_fit_the_batch_or_the_graph_are_refused() -> None:
    def traced(**lengths: object) -> LayerGraph:
        return trace(ZOO["gpt_tiny"], Job.model_validate({"lengths": lengths}))

    with pytest.raises(PipeplanError, match=r"longest is 65, but no entry .* ids \[1, 64\]"):
        traced(tokens=(8, 65), shares=(0.5, 0.5))
    the_graph = unequal([[(1, 2)] * 3] * 2, [1, 1, 1])
    with pytest.raises(PipeplanError, match=r"microbatches of one length, .* traced for 10 tokens"):
        Problem(the_graph, star(2), Job())
    other = job(2).model_copy(update={"tensor_parallel": 2})
    with pytest.raises(PipeplanError, match="tensor_parallel = 2: microbatches of several"):
        Problem(the_graph, star(2), other)
    for offload, said in ((True, "true"), ("if_needed", '"if_needed"')):
        away = job(2).model_copy(update={"offload": offload})
        with pytest.raises(PipeplanError, match=f"offload = {said}: microbatches of several"):
            Problem(the_graph, star(2), away)
    problem = Problem(the_graph, star(2), job(2))
    with pytest.raises(PipeplanError, match="3 lengths, but robust = True supports one"):
        solve(problem, robust=True)
    for runtime in ("torch", "deepspeed"):
        able = problem.job.model_copy(update={"runtime": runtime})
        with pytest.raises(PipeplanError, match=f"a plan for {runtime} supports one length"):
            solve(Problem(the_graph, star(2), able))


def test_a_graph_whose_layers_have_different_lengths_is_refused() -> None:
    data = unequal([[(1, 2)] * 3] * 2, [1, 1, 1]).record.model_dump(mode="json")
    data["layers"][1]["lengths"][0]["share"] = 0.4
    with pytest.raises(PipeplanError, match=r"layers\[1\].lengths: 'l1' has other lengths"):
        LayerGraph.parse(data)
    data["layers"][1]["lengths"] = data["layers"][0]["lengths"]
    times = {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}
    data["layers"][0]["measured"] = {"unit": times}
    with pytest.raises(PipeplanError, match=r"layers\[0\].lengths: the measured times of 'l0'"):
        LayerGraph.parse(data)
    data["layers"][0]["measured"] = {}
    data["boundaries"][0]["bytes"] += 1
    with pytest.raises(PipeplanError, match=r"boundaries\[0\].lengths: 't0' has .* bytes, but"):
        LayerGraph.parse(data)
