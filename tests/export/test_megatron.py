"""Plans as Megatron-LM layouts: read back they are the same stages, and what is lost is told."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import ROOT, device_type, graph, layer
from export_plans import torchrun
from hypothesis import given
from hypothesis import strategies as st
from peers import peer_environment, require_peer
from transformers_by_hand import machines, problem, transformer

from planner import PipeplanError, Plan, adopt, trace
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.interop.division import divide, render_layout
from planner.interop.exported import Exported
from planner.interop.megatron import _in_a_comment, export
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import format_order
from planner.plan.plan import Sync
from planner.plan.problem import Problem
from planner.plan.runtimes import for_runtime
from planner.prediction import refresh
from planner.schedules.assignment import balanced_assignment
from planner.schedules.whole import one_by_one


@pytest.mark.extensive
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, [("Ett|ttL", 1), ("Et|t|t|tL", 1), ("E|ttt|t|L", 1)]),
        (4, [("E|tt|ttt|L", 1), ("Ett|tL", 2), ("Et|t|ttt|t|t|t|t|L", 1), ("Et|tt|t|tL", 2)]),
    ],
)
def test_megatron_cores_schedules_train_an_export_as_one_process_does(
    tmp_path: Path, ranks: int, layouts: list[tuple[str, int]]
) -> None:
    """1F1B and interleaved, uneven stages, stages without blocks, one and two pipelines."""
    require_peer("megatron")
    for layout, replicas in layouts:
        size = ranks // replicas
        blocks = layout.count("t")
        cluster = machines(size, replicas)
        plan = adopt(
            problem(transformer(blocks), cluster, microbatches=4 * replicas),
            layout,
            pipeline_size=size,
            replicas=replicas,
        )
        folder = tmp_path / layout.replace("|", "_")
        folder.mkdir()
        (folder / "megatron.sh").write_text(export(plan).files["megatron.sh"])
        held = [
            [
                [int(name[2:]) for name in stage.layers if name.startswith("h.")]
                for stage in plan.stages
                if device in stage.devices
            ]
            for device in cluster.device_names
        ]
        (folder / "blocks.json").write_text(json.dumps(held))
    here = Path(__file__).parent
    environment = peer_environment(here, ROOT / "tests" / "adopting")
    out = torchrun(ranks, here / "megatron_worker.py", tmp_path, **environment)
    assert f"{len(layouts)} exports agree with a single process" in out


def flags(exported: Exported) -> dict[str, str]:
    """Flags and their values, as a shell reads them."""
    (inside,) = re.findall(
        r"^PIPEPLAN_ARGS=\(\n(.*?)^\)$", exported.files["megatron.sh"], re.S | re.M
    )
    words = shlex.split(inside, comments=True)
    for switch in (UNTIED, OVERLAP, SHARDED):
        if switch in words:
            words.remove(switch)
    return dict(zip(words[::2], words[1::2], strict=True))


def says_untied(exported: Exported) -> bool:
    """Whether the array that a shell makes of the script holds the flag."""
    script = exported.files["megatron.sh"] + '\nprintf "%s\\n" "${PIPEPLAN_ARGS[@]}"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    return UNTIED in done.stdout.splitlines()


UNTIED = "--untie-embeddings-and-output-weights"
OVERLAP = "--overlap-grad-reduce"
SHARDED = "--use-distributed-optimizer"


def with_head_of(parameter: str | None) -> Plan:
    """Two blocks; the head uses the parameter, and neither it nor the norm any for None."""
    data = transformer(2).record.model_dump(mode="json")
    for row in data["layers"]:
        if row["name"] == "lm_head":
            row["parameters"] = [parameter] if parameter else []
        elif row["name"] == "ln_f" and parameter is None:
            row["parameters"] = []
    return adopt(problem(LayerGraph.parse(data), machines(2)), "Et|tL")


def of_zoo(factory: str) -> Plan:
    job = Job(microbatches=2)
    return adopt(Problem(trace(f"models.{factory}", job), machines(2), job), "Ett|ttL")


@pytest.mark.parametrize(
    ("make", "argument", "untied"),
    [
        (with_head_of, "lm_head.weight", True),
        (with_head_of, "wte.weight", False),
        (with_head_of, None, False),
        (of_zoo, "gpt:gpt_tiny", False),
        (of_zoo, "llama:llama_tiny", True),
    ],
)
def test_weights_are_tied_as_those_of_the_model_are(
    make: Callable[[Any], Plan], argument: str | None, untied: bool
) -> None:
    assert says_untied(export(make(argument))) == untied


def by_hand(stages: list[tuple], blocks: int = 4, **job: object) -> Plan:
    """Stages on devices ``n0/gpu0`` …, one microbatch after the other."""
    specs = [StageSpec(tuple(names.split()), tuple(held.split())) for names, held in stages]
    told = problem(transformer(blocks), machines(4), **job)
    pipeline = place(told, specs)
    return plan_by_hand(pipeline, one_by_one(pipeline, balanced_assignment(pipeline)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[str], int, int]:
    """Symbols of stages, pipeline ranks and replicas."""
    size, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    count = size * (chunks if size > 1 else 1)
    rows = ["t" * draw(st.integers(1, 3)) for _ in range(count)]
    return (
        ["E" + rows[0], *rows[1:-1], rows[-1] + "L"] if count > 1 else ["EtL"],
        size,
        draw(st.integers(1, 2)),
    )


@given(layouts())
def test_a_layout_comes_back_as_it_went_in(told: tuple[list[str], int, int]) -> None:
    stages, size, replicas = told
    blocks = "".join(stages).count("t")
    the_problem = problem(
        transformer(blocks), machines(3, 2), microbatches=6 * replicas, samples_per_microbatch=1
    )
    plan = adopt(the_problem, render_layout(stages), pipeline_size=size, replicas=replicas)
    exported = export(plan)
    found = flags(exported)
    layout = found["--pipeline-model-parallel-layout"]
    assert layout == render_layout(stages)
    assert divide(the_problem.graph, layout) == tuple(stage.layers for stage in plan.stages)
    assert found["--pipeline-model-parallel-size"] == str(size)
    assert found["--num-layers"] == str(blocks)
    assert found["--micro-batch-size"] == "1"
    assert found["--global-batch-size"] == str(6 * replicas)
    assert (OVERLAP in exported.files["megatron.sh"]) == (replicas > 1)
    (note,) = exported.notes
    assert note.startswith("Megatron runs the plan's own order, ")
    assert ("interleaved" in note) == (len(stages) > size)


def test_ranks_count_replicas_before_stages() -> None:
    plan = adopt(problem(transformer(2), machines(2, 2)), "Et|tL", replicas=2)
    script = export(plan).files["megatron.sh"]
    found = re.findall(r"^#   rank (\d): (\S+)$", script, re.M)
    assert found == [("0", "n0/gpu0"), ("1", "n0/gpu1"), ("2", "n1/gpu0"), ("3", "n1/gpu1")]


def test_the_loss_of_the_schedule_is_predicted() -> None:
    """Stages of 2.2 + 4.4 s and 2.3 + 4.6 s: one by one 4 * 13.5 s, 1F1B 2.2 + 4 * 6.9 + 4.4 s."""
    plan = by_hand([("wte wpe h.0 h.1", "n0/gpu0"), ("h.2 h.3 ln_f lm_head loss", "n1/gpu0")])
    (note,) = export(plan).notes
    assert note == (
        "Megatron runs 1F1B instead of the planned order: 34.2 s predicted instead of 54 s (-36.7%)"
    )


def test_the_cost_is_that_of_the_plan_adopted_with_megatrons_schedule() -> None:
    told = problem(transformer(4), machines(2))
    ours = adopt(told, "Et|t|t|tL", pipeline_size=2, schedule="looped-breadth-first")
    theirs = adopt(told, "Et|t|t|tL", pipeline_size=2)
    change = theirs.predicted.iteration_time_s / ours.predicted.iteration_time_s - 1
    (note,) = export(ours).notes
    assert note.startswith("Megatron runs interleaved 1F1B instead of the planned order")
    assert f"({change:+.1%})" in note


def recomputing(*again: str) -> Plan:
    """Three blocks in stage 0, one in stage 1; what each recomputes."""
    plan = adopt(problem(transformer(4), machines(2)), "Ettt|tL")
    stages = tuple(
        stage.model_copy(update={"recompute": tuple(names.split())})
        for stage, names in zip(plan.stages, again, strict=True)
    )
    return refresh(plan.model_copy(update={"stages": stages}))


OWN_ORDER = "Megatron runs the plan's own order, 1F1B"


@pytest.mark.parametrize(
    ("again", "found", "notes"),
    [
        (("h.0 h.1 h.2", "h.3"), ("full", "uniform", "1"), [OWN_ORDER]),
        (("h.0", "h.3"), ("full", "block", "1"), [OWN_ORDER]),
        (
            ("h.1 h.2 wte", ""),
            ("full", "block", "2"),
            [
                "instead of",
                "Megatron recomputes blocks only: wte keep what they need",
                "the first 2 blocks of every stage",
            ],
        ),
        (("", ""), (None, None, None), [OWN_ORDER]),
    ],
)
def test_recomputation_is_of_the_first_blocks_of_every_stage(
    again: tuple[str, str], found: tuple[str | None, ...], notes: list[str]
) -> None:
    exported = export(recomputing(*again))
    names = ("granularity", "method", "num-layers")
    assert tuple(flags(exported).get(f"--recompute-{name}") for name in names) == found
    assert all(words in note for words, note in zip(notes, exported.notes, strict=True))


def test_recomputed_attention_is_selective() -> None:
    again = transformer(4).record.model_copy(update={"recomputes_attention": True})
    told = problem(LayerGraph.from_record(again), machines(2), recompute_attention=True)
    exported = export(adopt(told, "Ettt|tL"))
    assert flags(exported)["--recompute-granularity"] == "selective"
    assert "--recompute-method" not in flags(exported)
    with pytest.raises(PipeplanError, match="is either selective or full; plan again with one"):
        export(adopt(told, "Ettt|tL", recompute=True))
    assert for_runtime(told, "megatron").job.recompute is False


def test_state_that_replicas_share_is_the_distributed_optimizers() -> None:
    told = problem(transformer(4), machines(4), shard_optimizer=True)
    assert SHARDED in export(adopt(told, "Ettt|tL", replicas=2)).files["megatron.sh"]
    assert SHARDED not in export(adopt(told, "Ettt|tL")).files["megatron.sh"]


def test_memory_that_megatrons_order_lacks_is_told() -> None:
    """One by one holds one microbatch of two GiB a stage, 1F1B two in the first."""
    types = {"unit": device_type(memory_gib=3)}
    told = problem(transformer(4, stash_bytes=2**30), machines(2, **types))
    layers = divide(told.graph, "Ett|ttL")
    pipeline = place(told, [StageSpec(row, (f"n{i}/gpu0",)) for i, row in enumerate(layers)])
    plan = plan_by_hand(pipeline, one_by_one(pipeline, balanced_assignment(pipeline)))
    _, note = export(plan).notes
    assert note.startswith("Megatron's order holds 4 GiB on n0/gpu0, which has 3 GiB")


def test_strategies_and_jumps_between_nodes_are_noted() -> None:
    plan = adopt(problem(transformer(2), machines(2, 2)), "Et|tL", replicas=2)
    loose = plan.model_copy(update={"sync": Sync(strategy="semi_decentralized")})
    assert any("semi_decentralized is not exported" in note for note in export(loose).notes)
    names = ["n0/gpu0", "n1/gpu0", "n0/gpu1", "n1/gpu1"]
    plan = adopt(problem(transformer(4), machines(2, 2)), "Et|t|t|tL", devices=names)
    assert any("not grouped by node" in note for note in export(plan).notes)


def divided_block() -> Plan:
    told = problem(transformer(2, parts=2), machines(2))
    names = tuple(told.graph.layers)
    specs = [StageSpec(names[:3], ("n0/gpu0",)), StageSpec(names[3:], ("n1/gpu0",))]
    pipeline = place(told, specs)
    return plan_by_hand(pipeline, one_by_one(pipeline, balanced_assignment(pipeline)))


def two_stacks() -> Plan:
    names = ["shared", "encoder.0", "encoder.1", "decoder.0", "decoder.1", "loss"]
    return adopt(problem(graph([layer(name) for name in names]), machines(1)), [names])


def looped(**job: object) -> Plan:
    """Four stages on two ranks, in a V where the job says so."""
    schedule = job.pop("schedule", None)
    told = problem(transformer(4), machines(2), **job)
    return adopt(told, "Et|t|t|tL", pipeline_size=2, schedule=schedule)


TAIL = "h.2 h.3 ln_f lm_head loss"
REFUSED: dict[str, tuple[Callable[[], Plan], list[str]]] = {
    "an embedding in two stages": (
        lambda: by_hand([("wte", "n0/gpu0"), ("wpe h.0 h.1", "n1/gpu0"), (TAIL, "n2/gpu0")]),
        ["wpe in stage 1: E is the whole embedding (wte, wpe), in stage 0", "--stages 'E|tt|ttL'"],
    ),
    "a head in two stages": (
        lambda: by_hand([("wte wpe h.0 h.1 h.2 h.3 ln_f", "n0/gpu0"), ("lm_head loss", "n1/gpu0")]),
        ["ln_f in stage 0: L is the whole head and loss", "--stages 'Et*4|L'"],
    ),
    "a divided block": (divided_block, ["in stage 1: t is a whole block (h.0", "--stages 'Et|tL'"]),
    "two stacks of blocks": (
        two_stacks,
        ["it has an encoder and a decoder: encoder (2), decoder (2)"],
    ),
    "ranks of different numbers of stages": (
        lambda: by_hand([("wte wpe h.0", "n0/gpu0"), ("h.1", "n1/gpu0"), (TAIL, "n0/gpu0")]),
        ["3 stages on 2 pipeline ranks"],
    ),
    "stages that do not go around the ranks": (
        lambda: looped(schedule="zb-v"),
        ["stage 2 is on n1/gpu0 (and 1 stage more): Megatron puts stage i on pipeline rank i % 2"],
    ),
    "replicas with different companions": (
        lambda: by_hand([("wte wpe h.0 h.1", "n0/gpu0 n1/gpu0"), (TAIL, "n1/gpu0 n2/gpu0")]),
        ["stage 0 is on n0/gpu0, n1/gpu0, stage 1 on n1/gpu0, n2/gpu0"],
    ),
    "several stages on one rank alone": (
        lambda: by_hand([("wte wpe h.0 h.1", "n0/gpu0"), (TAIL, "n0/gpu0")]),
        ["interleaving needs two pipeline ranks"],
    ),
    "all reasons at once": (
        lambda: by_hand([("wte", "n0/gpu0 n1/gpu0"), (f"wpe h.0 h.1 {TAIL}", "n2/gpu0")]),
        ["E is the whole embedding", "'E|t*4L'", "different numbers of replicas (0: 2, 1: 1)"],
    ),
    "microbatches that pipelines cannot share": (
        lambda: by_hand([(f"wte wpe h.0 h.1 {TAIL}", "n0/gpu0 n1/gpu0 n2/gpu0")]),
        ["4 cannot be shared out equally among 3 pipelines"],
    ),
    "microbatches that are no multiple of ranks": (
        lambda: looped(microbatches=5),
        ["job.microbatches: 5: Megatron's interleaved 1F1B asks for a multiple of the 2"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_stages_that_megatron_cannot_run_are_refused_for_every_reason(case: str) -> None:
    make, expected = REFUSED[case]
    with pytest.raises(PipeplanError) as caught:
        export(make())
    assert all(words in why for why, words in zip(caught.value.problems, expected, strict=True))


def test_split_backwards_are_whole_in_megatron() -> None:
    told = problem(transformer(4), machines(2))
    plan = adopt(told, "Ett|ttL", schedule="zb-h1")
    assert "W" in format_order(plan.parsed_orders()["n1/gpu0"])
    (note,) = export(plan).notes
    assert note.startswith("Megatron runs 1F1B instead of the planned order")


@given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 3))
def test_interleaved_1f1b_is_in_megatrons_order(size: int, chunks: int, rounds: int) -> None:
    """By Megatron's rule: virtual microbatch k is chunk k / PP mod V of its round of PP.

    Rank r runs 2 (PP - r - 1) + (V - 1) PP forwards first, then a forward and a backward in turn.
    """
    microbatches = size * rounds
    told = problem(transformer(size * chunks), machines(size), microbatches=microbatches)
    stages = ["Et", *["t"] * (size * chunks - 2), "tL"]
    plan = adopt(told, render_layout(stages), pipeline_size=size)
    total = microbatches * chunks
    for rank in range(size):

        def words(kind: str, rank: int = rank) -> list[str]:
            rows = []
            for k in range(total):
                chunk = k // size % chunks
                chunk = chunk if kind == "F" else chunks - 1 - chunk
                rows.append(f"{chunk * size + rank}{kind}{k // (size * chunks) * size + k % size}")
            return rows

        ahead = min(total, 2 * (size - rank - 1) + (chunks - 1) * size)
        forward, backward = words("F"), words("B")
        pairs = zip(forward[ahead:], backward, strict=False)
        order = forward[:ahead] + [word for pair in pairs for word in pair]
        order += backward[total - ahead :]
        assert plan.orders[f"n{rank}/gpu0"].split() == order


def test_a_name_cannot_leave_its_comment() -> None:
    assert "\n" not in _in_a_comment("gpu0\nrm -rf .")
    assert _in_a_comment("n0/gpu0") == "n0/gpu0"
