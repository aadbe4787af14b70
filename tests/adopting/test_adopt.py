"""Plans of what already runs: stages, ranks and orders are those that were told."""

import re

import pytest
from builders import device_type, graph, layer, parameter
from transformers_by_hand import machines, problem, transformer

from planner import PipeplanError, Plan, adopt, export_plan, verify
from planner.interop.adopted import adopted, overflow_problems
from planner.interop.division import divide, parse_layout
from planner.interop.torch_pipelining import ScheduleTable
from planner.job import Job
from planner.plan.operations import parse_order
from planner.plan.problem import Problem
from planner.prediction import replay
from planner.schedules.assignment import balanced_assignment
from planner.schedules.published import SPLIT, WHOLE


def table(*rows: str) -> ScheduleTable:
    return ScheduleTable(tuple(parse_order(row, "row") for row in rows), "schedule.csv")


def layers(plan: Plan) -> list[str]:
    return [" ".join(stage.layers) for stage in plan.stages]


def devices(plan: Plan) -> list[tuple[str, ...]]:
    return [stage.devices for stage in plan.stages]


def test_a_layout_divides_embedding_blocks_and_head() -> None:
    plan = adopt(problem(transformer(4), machines(4)), "E|t|t*3|L")
    assert layers(plan) == ["wte wpe", "h.0", "h.1 h.2 h.3", "ln_f lm_head loss"]
    assert devices(plan) == [(f"n{node}/gpu0",) for node in range(4)]
    assert verify(plan) == []
    assert plan.predicted.gap is None
    assert plan.provenance.solver == "none: adopted with 1f1b"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("Ett|tmmL", ["wte wpe h.0 h.1", "h.2 ln_f mtp.0 mtp.1 lm_head loss"]),
        ("Et|tt|mm|L", ["wte wpe h.0", "h.1 h.2 ln_f", "mtp.0 mtp.1", "lm_head loss"]),
    ],
)
def test_multi_token_prediction_has_a_place_behind_the_norm(
    layout: str, expected: list[str]
) -> None:
    """The norm is with the last block (megatron-core, has_final_layernorm_in_this_stage)."""
    plan = adopt(problem(transformer(3, ahead=2), machines(4)), layout)
    assert layers(plan) == expected
    assert verify(plan) == []
    script = export_plan(plan, "megatron").files["megatron.sh"]
    assert "--mtp-num-layers 2" in script
    assert parse_layout(re.findall(r'layout "(.*)"', script)[0]) == parse_layout(layout)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ettt|mL", "m appears 1 times, but the model has 2 blocks of multi-token prediction"),
        ("Ett|mm|tL", "m stands before a t; multi-token prediction follows all blocks"),
        ("Ettt|m|mL", "m stands in several stages; Megatron-LM has all multi-token"),
    ],
)
def test_multi_token_prediction_elsewhere_is_refused(layout: str, message: str) -> None:
    with pytest.raises(PipeplanError, match=re.escape(message)):
        adopt(problem(transformer(3, ahead=2), machines(4)), layout)


def test_a_block_of_several_layers_stays_whole() -> None:
    plan = adopt(problem(transformer(2, parts=2), machines(2)), "Et|tL")
    assert layers(plan) == ["wte wpe h.0.part0 h.0.part1", "h.1.part0 h.1.part1 ln_f lm_head loss"]


def test_stages_go_around_the_ranks() -> None:
    plan = adopt(problem(transformer(4), machines(2)), "Et|t|t|tL", pipeline_size=2)
    assert devices(plan) == [("n0/gpu0",), ("n1/gpu0",)] * 2
    assert plan.provenance.solver == "none: adopted with interleaved-1f1b"
    assert verify(plan) == []


def test_1f1b_takes_what_a_calculation_by_hand_says() -> None:
    """Two equal stages of 1.2 + 2.4 s and 4 microbatches: (4 + 1) * 3.6 s, without transfers."""
    rows = [layer(n, 0.6, 1.2, parameters=[f"{n}.weight"]) for n in ("wte", "h.0", "h.1", "head")]
    parameters = [parameter(name, elements=1) for row in rows for name in row["parameters"]]
    plan = adopt(problem(graph(rows, [], parameters=parameters), machines(2)), "Et|tL")
    assert plan.predicted.iteration_time_s == pytest.approx(5 * 3.6)
    assert plan.orders["n0/gpu0"] == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    assert plan.orders["n1/gpu0"] == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"


@pytest.mark.parametrize("name", sorted(WHOLE | SPLIT))
def test_a_schedule_by_name_is_the_planners_own(name: str) -> None:
    """The generators have tests of their own against their papers."""
    loops = name in ("interleaved 1f1b", "looped breadth first", "zb-v", "dualpipe-v")
    size = 2 if loops else 4
    told = problem(transformer(4), machines(4))
    plan = adopt(told, "Et|t|t|tL", schedule=name.replace(" ", "-"), pipeline_size=size)
    pipeline = replay(plan).pipeline
    expected = (WHOLE | SPLIT)[name](pipeline, balanced_assignment(pipeline))
    assert {d: tuple(row) for d, row in expected.items()} == plan.parsed_orders()
    assert verify(plan) == []


def test_a_v_goes_down_the_ranks_and_up_again() -> None:
    plan = adopt(problem(transformer(4), machines(2)), "Et|t|t|tL", schedule="zb-v")
    assert devices(plan) == [("n0/gpu0",), ("n1/gpu0",), ("n1/gpu0",), ("n0/gpu0",)]


def test_replicas_are_neighbours_and_share_the_microbatches_equally() -> None:
    plan = adopt(problem(transformer(2), machines(2, 2)), "Et|tL", replicas=2)
    assert devices(plan) == [("n0/gpu0", "n0/gpu1"), ("n1/gpu0", "n1/gpu1")]
    assert plan.orders["n0/gpu0"] == "0F0 0F2 0B0 0B2"
    assert plan.orders["n0/gpu1"] == "0F1 0F3 0B1 0B3"
    assert plan.orders["n1/gpu1"] == "1F1 1B1 1F3 1B3"
    assert verify(plan) == []


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_the_first_pipelines_run_the_microbatches_that_are_left(schedule: str) -> None:
    """Five microbatches over two pipelines take as long as six, or less on shared links."""
    plan, six = (
        adopt(
            problem(transformer(2), machines(2, 2), microbatches=number),
            "Et|tL",
            replicas=2,
            schedule=schedule,
        )
        for number in (5, 6)
    )
    shares = [{op.microbatch for op in plan.parsed_orders()[f"n0/gpu{i}"]} for i in (0, 1)]
    assert shares == [{0, 2, 4}, {1, 3}]
    assert verify(plan) == []
    assert plan.predicted.iteration_time_s <= six.predicted.iteration_time_s


def test_every_pipeline_has_a_microbatch() -> None:
    with pytest.raises(PipeplanError, match="2 are fewer than the 3 pipelines"):
        adopt(problem(transformer(4), machines(4), microbatches=2), "Et*4L", replicas=3)


def test_replicas_may_be_interleaved() -> None:
    plan = adopt(
        problem(transformer(4), machines(2, 2), microbatches=8),
        "Et|t|t|tL",
        pipeline_size=2,
        replicas=2,
    )
    one = adopt(problem(transformer(4), machines(2), microbatches=4), "Et|t|t|tL", pipeline_size=2)
    first = [op._replace(microbatch=op.microbatch // 2) for op in plan.parsed_orders()["n0/gpu0"]]
    assert tuple(first) == one.parsed_orders()["n0/gpu0"]
    assert verify(plan) == []


def test_devices_are_taken_in_the_order_told() -> None:
    names = ["n2/gpu0", "n0/gpu0"]
    plan = adopt(problem(transformer(2), machines(3)), "Et|tL", devices=names)
    assert devices(plan) == [("n2/gpu0",), ("n0/gpu0",)]


def test_modules_of_torchtitan_divide_a_model() -> None:
    """Layers without parameters, such as the loss, go where their input is."""
    stages = [["wte", "wpe", "h.0"], ["h.1"], ["ln_f", "lm_head"]]
    plan = adopt(problem(transformer(2, parts=2), machines(3)), stages)
    assert layers(plan) == [
        "wte wpe h.0.part0 h.0.part1",
        "h.1.part0 h.1.part1",
        "ln_f lm_head loss",
    ]


def test_a_second_visit_may_be_named_by_itself() -> None:
    rows = [layer(n, parameters=["s.weight"]) for n in ("shared", "shared#2")]
    model = graph(rows, parameters=[parameter("s.weight")])
    assert divide(model, [["shared"], ["shared#2"]]) == (("shared",), ("shared#2",))
    assert divide(model, [["shared"]]) == (("shared", "shared#2"),)


def test_a_table_is_run_as_it_stands() -> None:
    rows = "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0", "1F0 1F1 1F2 1F3 1I3 1I2 1I1 1I0 1W3 1W2 1W1 1W0"
    plan = adopt(problem(transformer(2), machines(2)), "Et|tL", schedule=table(*rows))
    assert list(plan.orders.values()) == list(rows)
    assert verify(plan) == []


def test_a_table_places_its_stages() -> None:
    rows = "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"
    told = problem(transformer(4), machines(2), microbatches=1)
    plan = adopt(told, "Et|t|t|tL", schedule=table(*rows))
    assert devices(plan) == [("n0/gpu0",), ("n1/gpu0",), ("n1/gpu0",), ("n0/gpu0",)]


def test_a_table_is_run_by_every_replica() -> None:
    told = problem(transformer(2), machines(2, 2), microbatches=2)
    plan = adopt(told, "Et|tL", schedule=table("0F0 0B0", "1F0 1B0"), replicas=2)
    assert plan.orders["n0/gpu1"] == "0F1 0B1"
    assert verify(plan) == []


def test_recomputation_is_of_every_block_and_nothing_else() -> None:
    plan = adopt(problem(transformer(2), machines(2)), "Et|tL", recompute=True)
    assert [stage.recompute for stage in plan.stages] == [("h.0",), ("h.1",)]
    plain = adopt(problem(transformer(2), machines(2)), "Et|tL")
    assert plan.predicted.iteration_time_s > plain.predicted.iteration_time_s


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        ("Et|t|L", {}, "t appears 2 times, but the model has 4 blocks (h.0 to h.3)"),
        ("t|Et*3L", {}, "E must appear exactly once, at the start"),
        ("Et*4L|", {}, "stage 1 is empty"),
        ("Et*4|LL", {}, "L must appear exactly once, at the end"),
        ("Et*4|mL", {}, "m appears 1 times, but the model has 0 blocks of multi-token prediction"),
        ("Ett|t|tL", {"pipeline_size": 2}, "pipeline_size 2: does not divide the 3 stages"),
        ("Ett|ttL", {"schedule": "2f2b"}, "schedule 2f2b: no such schedule; choose from gpipe"),
        (
            "Ett|ttL",
            {"pipeline_size": 1, "schedule": "1f1b"},
            "schedule 1f1b: a device holds several stages; defined for these stages are: looped",
        ),
        ("Ett|t|tL", {"schedule": "zb-v"}, "two stages on every rank"),
        ("Ett|ttL", {"devices": ["n0/gpu0", "x"]}, "has no device 'x'; it has n0/gpu0"),
        ("Ett|ttL", {"devices": ["n0/gpu0"] * 2}, "n0/gpu0 named several times"),
        ("Ett|ttL", {"devices": ["n0/gpu0"]}, "names 1 device, 2 pipeline ranks of 1 replica"),
        ("Ett|ttL", {"replicas": 3}, "has 4 devices, 2 pipeline ranks of 3 replicas are 6"),
        ("Et*4L", {"replicas": 5}, "has 4 devices, 1 pipeline rank of 5 replicas are 5"),
        ([["wte", "wpe", "h"], []], {}, "stages[1]: is empty"),
        ([["wte", "wpe", "h"]], {}, "ln_f, lm_head: have parameters but are in no stage"),
        ([["wte", "h.4"]], {}, "stages[0][1]: 'h.4' is no layer of 'by-hand'; use 'h."),
        ([["wte", "wpe", "h.0.attn"]], {}, "'h.0.attn' is inside layer 'h.0'"),
        ([["wte", "h"], ["h.1"]], {}, "stages[1][0]: 'h.1' names layer 'h.1', which is in stage 0"),
        ([["wte", "wpe", "lm_head", "ln_f"], ["h"]], {}, "is used by 'ln_f' in earlier stage 0"),
    ],
)
def test_what_does_not_fit_together_is_told(stages: object, options: dict, message: str) -> None:
    with pytest.raises(PipeplanError) as caught:
        adopt(problem(transformer(4), machines(4)), stages, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0B0", "1F0 1B0"], "runs 1 microbatch, the job has 2; set microbatches = 1"),
        (["0F0 0B0 0F1 0B1"], "no row runs stage 1 of 2"),
        (["0F0 0B0 0F1 0B1", "1F0 1B0", "2F0"], "row 3 runs stage 2, there are 2 stages"),
        (["0F0 0B0 1F1", "1F0 1B0 0F1"], "stage 0 is in rows 1, 2; a stage is on one rank"),
        (["0F0 0B0 0F1", "1F0 1F1 1B0 1B1"], "row 1: stage 0 runs F of microbatch 1"),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1 1B1"], "runs F, B, B of microbatch 1"),
        (["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], "deadlock"),
    ],
)
def test_a_table_that_does_not_fit_is_told(rows: list[str], message: str) -> None:
    told = problem(transformer(2), machines(3), microbatches=2)
    with pytest.raises(PipeplanError) as caught:
        adopt(told, "Et|tL", schedule=table(*rows))
    assert message in str(caught.value)
    assert "schedule.csv" in str(caught.value)


def tight(memory_gib: float, **job: object) -> Problem:
    """Blocks keep 1 GiB a microbatch; the machines have little."""
    types = {"unit": device_type(memory_gib=memory_gib)}
    model = transformer(4, stash_bytes=2**30)
    return problem(model, machines(2, **types), microbatches=8, **job)


def told_overflow(told: Problem, schedule: str) -> list[str]:
    found = adopted(
        told,
        divide(told.graph, "Ett|ttL"),
        schedule=schedule,
        pipeline_size=None,
        replicas=1,
        devices=None,
        recompute_blocks=0,
    )
    return overflow_problems(found)


def test_a_plan_that_fits_has_no_overflow() -> None:
    assert told_overflow(tight(100), "gpipe") == []


def test_an_overflow_is_told_by_stage_with_what_was_tried() -> None:
    """Eight microbatches of two GiB are in flight in GPipe, two of them in 1F1B's first stage."""
    first, second, advice = told_overflow(tight(10), "gpipe")
    assert first.startswith("stage 0 on n0/gpu0: peak 16 GiB")
    assert first.endswith("the device has 10 GiB, 6 GiB too little")
    assert second.startswith("stage 1 on n1/gpu0: ")
    assert "--schedule 1f1b, " in advice
    assert "gpipe" not in advice


def test_what_is_advised_fits() -> None:
    """Recomputed, stages keep next to nothing: GPipe fits as well."""
    advice = told_overflow(tight(10), "gpipe")[-1].partition(";")[0]
    recompute, schedules = advice.removeprefix("it would fit with ").split(" or ")
    assert recompute == "--recompute"
    assert verify(adopt(tight(10), "Ett|ttL", schedule="gpipe", recompute=True)) == []
    names = schedules.removeprefix("--schedule ").split(", ")
    assert names
    for name in names:
        assert verify(adopt(tight(10), "Ett|ttL", schedule=name)) == [], name


def test_where_nothing_helps_that_is_said() -> None:
    *_, advice = told_overflow(tight(0.001), "1f1b")
    assert advice.startswith("neither --recompute nor another schedule of these stages fits")


def test_job_rules_are_for_verify() -> None:
    job = Job(optimizer="sgd", microbatches=4, max_stages_per_device=1)
    told = Problem(transformer(2), machines(1), job)
    (found,) = verify(adopt(told, "Et|tL", pipeline_size=1))
    assert "set job.max_stages_per_device to 2" in found
