"""Single changes of a plan: the time listed is that of the plan made, the best is the best."""

from collections.abc import Iterator
from itertools import product

import pytest
from builders import ROOT, cluster, device_type, link
from hypothesis import given, settings
from strategies import plans
from transformers_by_hand import machines, problem, transformer

import planner.analysis.moves as moves_module
from planner import Job, PipeplanError, Plan, adopt, apply_move, moves, trace, verify
from planner.analysis.changes import KEEPS_ORDERS, parse_move
from planner.analysis.judge import Judge
from planner.analysis.moves import LEAST_GAIN, candidate_moves
from planner.cluster.cluster import Cluster
from planner.costs.placement import specs_of
from planner.plan.problem import Problem
from planner.search.microbatches import in_proportion
from planner.search.solve import solve

TEXTS = (
    "begin stage 1 at h.3",
    "exchange devices n0/gpu0 and my own device",
    "add replica n2/gpu0 to stage 1",
    "remove replica n2/gpu0 from stage 12",
    "move replica n2/gpu0 from stage 1 to stage 0",
    "merge stages 1 and 2",
    "split stage 0 before h.3",
    "split stage 0 before h.3 onto n1/gpu0",
    "reschedule all stages",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_move_is_written_as_it_was_read(text: str) -> None:
    assert str(parse_move(text)) == text


@pytest.mark.parametrize(
    "text", ["move h.3", "recompute h.3", "microbatches x2", "device n0/gpu0 speed x2", "add x"]
)
def test_what_is_no_move_is_refused(text: str) -> None:
    with pytest.raises(PipeplanError, match=f"change '{text}': "):
        parse_move(text)


def uneven(blocks: str = "Et*2|t*2|t*4L", nodes: int = 4, **job: object) -> Plan:
    """Blocks of 3 s each in stages of 2, 2 and 4 unless told otherwise; a device is left."""
    return adopt(problem(transformer(8), machines(nodes), **{"microbatches": 8, **job}), blocks)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("begin stage 0 at h.1", "stage 0 begins with the model"),
        ("begin stage 2 at h.1", "'h.1' is no layer of stages 1 and 2 behind .*; choose one such"),
        ("begin stage 2 at h.4", "stage 2 begins there already"),
        ("begin stage 7 at h.1", "there is no stage 7; the last is 2"),
        ("exchange devices n0/gpu0 and n9/gpu0", "the cluster has no device 'n9/gpu0'"),
        ("exchange devices n3/gpu0 and n3/gpu0", "it is one device"),
        ("add replica n1/gpu0 to stage 1", "it holds stage 1 already"),
        ("remove replica n1/gpu0 from stage 0", "it does not hold stage 0"),
        ("remove replica n1/gpu0 from stage 1", "stage 1 has no other device"),
        ("merge stages 0 and 2", "not next to each other"),
        ("split stage 2 before h.4", "no layer of stage 2 behind its first"),
        ("split stage 2 before h.6", "stage 2 has one device; name another"),
    ],
)
def test_what_cannot_be_made_is_refused_with_its_reason(text: str, said: str) -> None:
    with pytest.raises(PipeplanError, match=f"change '{text}': .*{said}"):
        apply_move(uneven(), text)


def test_a_move_beyond_the_job_is_refused_with_the_freedom_that_it_needs() -> None:
    plan = uneven(replication=False, max_stages_per_device=1)
    text = "add replica n3/gpu0 to stage 2"
    with pytest.raises(PipeplanError, match=r"job\.replication is false; .* set job\.replication"):
        apply_move(plan, text)
    assert text not in [str(move) for move in candidate_moves(plan)]


def even_boundaries(plan: Plan, the_problem: Problem) -> Iterator[tuple[float, Plan]]:
    """Every shift of one boundary of three stages by whole blocks, adopted like the plan itself."""
    for first, second in product(range(1, 7), repeat=2):
        third = 8 - first - second
        moved = abs(first - 2) + abs(third - 4)
        if third >= 1 and moved and (first == 2 or third == 4):
            made = adopt(the_problem, f"Et*{first}|t*{second}|t*{third}L")
            yield made.predicted.iteration_time_s, made


def test_no_adopted_plan_with_another_boundary_is_faster_than_the_best_move() -> None:
    """1F1B depends on the number of stages alone, so orders stay when a boundary moves."""
    plan = uneven(nodes=3)
    best_s, _ = min(even_boundaries(plan, plan.problem), key=lambda row: row[0])
    best = next(row for row in moves(plan).fitting if row.move.kind == "boundary")
    assert best.iteration_time_s <= best_s * (1 + 1e-12)
    found = apply_move(plan, best.move)
    assert found.predicted.iteration_time_s == best.iteration_time_s
    assert verify(found) == []


def test_a_replica_shares_the_microbatches_of_its_stage() -> None:
    """Half of 8 microbatches of 4.3 blocks on each of two devices."""
    found = apply_move(uneven(backward="whole"), "add replica n3/gpu0 to stage 2")
    assert found.stages[2].devices == ("n2/gpu0", "n3/gpu0")
    orders = found.parsed_orders()
    assert len(orders["n2/gpu0"]) == len(orders["n3/gpu0"]) == 8
    assert verify(found) == []
    back = apply_move(found, "remove replica n2/gpu0 from stage 2")
    assert back.stages[2].devices == ("n3/gpu0",)
    assert set(back.orders) == {"n0/gpu0", "n1/gpu0", "n3/gpu0"}
    assert verify(back) == []


def test_the_slow_device_goes_where_least_is_to_do() -> None:
    """The last device is half as fast; 1 block instead of 3 is then the best place for it."""
    types = {"unit": device_type(), "slow": device_type(peak_tflop_per_s={"float32": 0.5})}
    names = {"d0": "unit", "d1": "unit", "d2": "slow"}
    star = cluster(names, [link(name, "hub", 1000) for name in names], ["hub"], types)
    plan = adopt(problem(transformer(7), star, microbatches=8), "Et*3|t|t*3L")
    exchanges = [row for row in moves(plan).fitting if str(row.move).startswith("exchange")]
    assert str(exchanges[0].move) == "exchange devices d1 and d2"
    assert exchanges[0].gain > LEAST_GAIN


def test_interchangeable_devices_are_exchanged_with_nobody() -> None:
    found = [str(move) for move in candidate_moves(uneven())]
    assert not any(text.startswith("exchange") for text in found)
    assert [text for text in found if text.startswith("add")] == [
        f"add replica n3/gpu0 to stage {stage}" for stage in range(3)
    ]


def test_a_faster_move_beyond_memory_says_what_is_lacking() -> None:
    """A block stashes 0.25 GiB: the first stage may have 3 in flight of 2 blocks, no third."""
    the_cluster = machines(3, unit=device_type(memory_gib=1.6))
    blocks = transformer(9, stash_bytes=2**28)
    asked = {"recompute": False, "order": "1f1b", "replication": False}
    plan = adopt(problem(blocks, the_cluster, microbatches=8, **asked), "Et*2|t*2|t*5L")
    found = moves(plan)
    over = next(row for row in found.overflowing if str(row.move).startswith("begin stage 2"))
    problems = verify(apply_move(plan, over.move))
    assert len(problems) == len(over.lacks_bytes) > 0
    assert all(text.startswith("memory of ") for text in problems)
    assert all(row.lacks_bytes == {} for row in found.fitting)


def test_a_quick_answer_says_how_much_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = uneven()
    whole = moves(plan)
    monkeypatch.setattr(moves_module, "MOST_EVENTS", 200)
    short = moves(plan)
    assert short.best == whole.best
    assert whole.left_out == 0 < short.left_out
    counts = [len(row.fitting) + row.no_faster + row.left_out for row in (whole, short)]
    assert counts[0] == counts[1]


@settings(max_examples=25)
@given(plans())
def test_a_listed_move_makes_a_plan_of_its_time(plan: Plan) -> None:
    """The verifier's replay shares no code with the one that times a move."""
    own = verify(plan)
    for row in moves(plan).fitting[:4]:
        made = apply_move(plan, str(row.move))
        assert made.predicted.iteration_time_s == row.iteration_time_s
        assert own or verify(made) == []


def test_layers_stay_on_the_devices_that_may_run_them() -> None:
    rows = transformer(4, device_types=["unit"])
    types = {"unit": device_type(), "other": device_type()}
    names = {"d0": "unit", "d1": "unit", "d2": "other"}
    star = cluster(names, [link(name, "hub", 1000) for name in names], ["hub"], types)
    plan = adopt(problem(rows, star), "Et*2|t*2|L")
    with pytest.raises(PipeplanError, match=r"layer 'h\.3' would be on 'd2', but runs on .* unit"):
        apply_move(plan, "begin stage 2 at h.3")
    for row in moves(plan).fitting:
        assert verify(apply_move(plan, row.move)) == []


CLUSTERS = ("irregular", "two_nodes", "single_node", "dapple_testbed")
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "pe")


def classic_plans() -> Iterator[Plan]:
    """A hundred even splits of transformers on the examples' clusters, by published schedules."""
    for name, schedule, blocks in product(CLUSTERS, SCHEDULES, (12, 16, 21, 24, 30)):
        the_cluster = Cluster.load(ROOT / "examples" / "clusters" / f"{name}.toml")
        stages = 3 + blocks % 2
        sizes = [blocks * (n + 1) // stages - blocks * n // stages for n in range(stages)]
        layout = "E" + "|".join("t" * size for size in sizes) + "L"
        rows = transformer(blocks, stash_bytes=2**27)
        told = problem(rows, the_cluster, microbatches=2 * stages + blocks % 5)
        yield adopt(told, layout, schedule=schedule, recompute=blocks == 21)


@pytest.mark.extensive
def test_best_moves_of_a_hundred_plans_gain_what_is_listed() -> None:
    """The verifier's own replay confirms the time of the plan that the best move makes."""
    count = 0
    for plan in classic_plans():
        found = moves(plan)
        best = found.best
        assert best is not None
        made = apply_move(plan, str(best.move))
        assert verify(made) == []
        gain = 1 - made.predicted.iteration_time_s / plan.predicted.iteration_time_s
        assert best.gain == pytest.approx(gain, abs=1e-9)
        count += 1
    assert count == 100


def test_a_plan_beyond_memory_is_made_to_fit() -> None:
    """A block stashes 0.25 GiB: 3 microbatches of 4 blocks in flight are too many, of 3 not."""
    the_cluster = machines(3, unit=device_type(memory_gib=2.6))
    told = problem(transformer(9, stash_bytes=2**28), the_cluster, recompute=False)
    found = moves(adopt(told, "Et*4|t*3|t*2L"))
    assert not found.fits
    assert found.best == found.fitting[0]
    assert all(not row.lacks_bytes for row in found.fitting)


def test_a_graph_of_another_microbatch_size_has_the_shapes_of_a_new_trace() -> None:
    """The executor refuses a plan whose tensors between layers differ from the model's."""
    two, four = (trace("models.gpt:gpt_tiny", Job(samples_per_microbatch=n)) for n in (2, 4))
    scaled = in_proportion(two, 4).record.boundaries
    assert [row.shape for row in scaled] == [row.shape for row in four.record.boundaries]


UNLIKE = {"unit": device_type(), "slow": device_type(peak_tflop_per_s={"float32": 0.5})}


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_of_a_longer_search_refutes_no_answer(seed: int) -> None:
    """From each plan one change away, the way back fits and is as fast as list schedules are."""
    names = {"d0": "unit", "d1": "unit", "d2": "slow", "d3": "slow"}
    links = [link(name, "hub", 10 + 5 * seed) for name in names]
    told = problem(transformer(7 + seed), cluster(names, links, ["hub"], UNLIKE), microbatches=6)
    plan = solve(told, deterministic=True, time_limit_s=0.5, seed=seed).plan
    judged = Judge(plan.problem).judged(tuple(specs_of(plan.stages)))
    assert judged is not None
    least_s = max(judged.seconds, plan.predicted.iteration_time_s) * (1 + 1e-9)
    tried = 0
    for change in candidate_moves(plan):
        if change.kind not in KEEPS_ORDERS:
            continue
        found = moves(apply_move(plan, change))
        assert found.left_out == 0
        assert min(row.iteration_time_s for row in found.fitting) <= least_s
        helps = least_s < found.plan_s * (1 - LEAST_GAIN)
        assert (found.best is not None) or not helps
        tried += 1
    assert tried or len(plan.stages) == 1


def test_what_better_orders_alone_would_save_is_a_change_of_its_own() -> None:
    """Adopted 1F1B with whole backwards, though the job allows split ones."""
    plan = uneven(nodes=3)
    found = {str(row.move): row for row in moves(plan).fitting}
    row = found["reschedule all stages"]
    made = apply_move(plan, "reschedule all stages")
    assert made.predicted.iteration_time_s == row.iteration_time_s < plan.predicted.iteration_time_s
    assert [stage.layers for stage in made.stages] == [stage.layers for stage in plan.stages]
    assert verify(made) == []


def test_stages_are_merged_and_split() -> None:
    plan = uneven()
    merged = apply_move(plan, "merge stages 0 and 1")
    assert [len(stage.devices) for stage in merged.stages] == [2, 1]
    assert verify(merged) == []
    first = merged.stages[0].layers[3]
    apart = apply_move(merged, f"split stage 0 before {first}")
    assert [stage.devices for stage in apart.stages] == [stage.devices for stage in plan.stages]
    assert verify(apart) == []
    last = plan.stages[2].layers[2]
    onto = apply_move(plan, f"split stage 2 before {last} onto n3/gpu0")
    assert [stage.devices[0] for stage in onto.stages] == [
        "n0/gpu0",
        "n1/gpu0",
        "n2/gpu0",
        "n3/gpu0",
    ]
    assert verify(onto) == []
