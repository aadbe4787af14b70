"""The schedule file, read and run by torch's own pipeline runtime."""

import csv
import io
import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from export_plans import NAMES, in_order, placed, shuffled, titan_graph, torchrun
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduled

from planner.assembly import plan_by_hand
from planner.errors import PipeplanError
from planner.interop.exported import export_plan
from planner.interop.torch_pipelining import schedule_csv
from planner.plan.operations import parse_operation
from planner.plan.plan import Plan

WORKER = Path(__file__).parent / "torch_worker.py"
WAYS = {
    "one stage a rank": ("d0", "d1", "d2"),
    "loop": ("d0", "d1", "d2", "d0", "d1", "d2"),
    "V": ("d0", "d1", "d2", "d2", "d1", "d0"),
    "neighbours on a rank": ("d0", "d0", "d1"),
    "anywhere": ("d1", "d0", "d2", "d1"),
}


def plan_on(*devices: str, seed: int = 0, microbatches: int = 4) -> Plan:
    cuts = [1, 3, 4, 6, 7][: len(devices) - 1]
    return shuffled(placed(titan_graph(), cuts, devices, microbatches=microbatches), seed)


def rows_of(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def with_idle_cells(text: str, seed: int) -> str:
    """The same schedule with blanks, in which torch sees idle time."""
    draw = random.Random(seed)
    rows = [
        [cell for word in row for cell in [""] * draw.randrange(3) + [word]]
        for row in rows_of(text)
    ]
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue()


@pytest.mark.extensive
def test_torch_runs_the_schedules_and_gets_the_gradients_of_one_process(tmp_path: Path) -> None:
    """Random orders with backwards whole and split, on every kind of placement."""
    for number, devices in enumerate((*WAYS.values(), *WAYS.values())):
        exported = export_plan(plan_on(*devices, seed=number), "torch-csv")
        folder = tmp_path / f"{number:02}"
        folder.mkdir()
        for name, text in exported.files.items():
            idle = name.endswith(".csv") and number >= len(WAYS)
            (folder / name).write_text(with_idle_cells(text, number) if idle else text)
    assert "10 schedules agree with a single process" in torchrun(3, WORKER, tmp_path)


def lowered(text: str, folder: Path, stages: int, ranks: int, microbatches: int) -> dict:
    """What torch's lowering makes of a schedule file, with sends and receives."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    path = folder / "schedule.csv"
    path.write_text(text)
    runtime = _PipelineScheduleRuntime.__new__(_PipelineScheduleRuntime)
    runtime.pipeline_order, runtime._stages = {}, []
    runtime.pp_group_size, runtime._num_stages = ranks, stages
    runtime._n_microbatches, runtime._defer_pp_recv = microbatches, False
    # Defaults of torch 2.15, which older versions do not read.
    runtime._unshard_lookahead, runtime._max_active_stages = "full", 3
    runtime._defer_reduce_grad_wait, runtime._max_outstanding_sends = False, None
    runtime._load_csv(str(path), format="compute_only")
    return runtime.pipeline_order_with_comms


@pytest.mark.parametrize("devices", WAYS.values(), ids=WAYS)
def test_idle_time_changes_nothing_in_what_torch_runs_on_a_rank(
    devices: tuple[str, ...], tmp_path: Path
) -> None:
    plan = plan_on(*devices, seed=3)
    text = export_plan(plan, "torch-csv").files["schedule.csv"]
    numbers = (len(plan.stages), len(plan.ranks), plan.microbatches)
    plain = lowered(text, tmp_path, *numbers)
    assert lowered(with_idle_cells(text, 1), tmp_path, *numbers) == plain


@given(scheduled(replicas=False))
def test_a_schedule_file_says_the_orders_and_nothing_else(case: object) -> None:
    rows = rows_of(schedule_csv(case.orders.values()))
    assert [[parse_operation(word) for word in row] for row in rows] == list(case.orders.values())


@given(scheduled(replicas=False))
def test_a_plan_is_written_or_refused_for_a_reason_that_holds(case: object) -> None:
    plan = plan_by_hand(case.pipeline, case.orders)
    if plan.job.shard_optimizer:
        with pytest.raises(PipeplanError, match="shard_optimizer = true"):
            export_plan(plan, "torch-csv")
        return
    last = len(plan.stages) - 1
    forwards = [
        row.microbatch
        for order in plan.parsed_orders().values()
        for row in order
        if row.stage == last and row.kind == "F"
    ]
    if forwards != sorted(forwards):
        with pytest.raises(PipeplanError, match=f"{last}F.* comes after"):
            export_plan(plan, "torch-csv")
        return
    files = export_plan(plan, "torch-csv").files
    rows = rows_of(files["schedule.csv"])
    table = json.loads(files["stages.json"])
    assert dict(zip(table["ranks"], rows, strict=True)) == {
        device: text.split() for device, text in plan.orders.items()
    }
    ranks = [row["ranks"] for row in table["stages"]]
    assert ranks == [[plan.ranks.index(*stage.devices)] for stage in plan.stages]


@given(st.integers(0, 1000))
def test_cuts_say_every_tensor_that_a_later_stage_uses(seed: int) -> None:
    draw = random.Random(seed)
    pairs = [sorted(draw.sample(range(len(NAMES)), 2)) for _ in range(4)]
    skips = [(NAMES[a], NAMES[b]) for a, b in pairs if b > a + 1]
    cuts = sorted(draw.sample(range(1, 8), 3))
    plan = in_order(
        placed(titan_graph(NAMES, *dict.fromkeys(skips)), cuts, ("d0", "d1", "d2", "d3"))
    )
    table = json.loads(export_plan(plan, "torch-csv").files["stages.json"])
    edges = {*pairwise(NAMES), *skips}
    for (cut, before), after in zip(
        zip(cuts, table["stages"], strict=False), table["stages"][1:], strict=True
    ):
        crossing = {f"{a}-to-{b}" for a, b in edges if NAMES.index(a) < cut <= NAMES.index(b)}
        assert {row["name"] for row in before["sends"]} == crossing
        assert before["sends"] == after["receives"]


def test_notes_say_what_the_file_does_not_carry() -> None:
    graph = titan_graph(NAMES, ("tok_embeddings", "norm"), tied=True)
    pipeline = placed(graph, [2, 5], ("d0", "d1", "d2"), recompute={0: ["layers.0"]})
    notes = "\n".join(export_plan(in_order(pipeline), "torch-csv").notes)
    assert "'tok_embeddings-to-norm' goes from stage 0 to stage 2" in notes
    assert "'tok_embeddings.weight' is used by stages 0 and 2" in notes
    assert "recompute: 1 of 9 layers" in notes
    assert "the layer 'loss' is no module" in notes


def test_the_note_on_buffers_counts_every_microbatch() -> None:
    """Of the stage in the middle: 4 microbatches, 1 MB of activations in and of gradients in."""
    plan = in_order(placed(titan_graph(), [3, 6], ("d0", "d1", "d2")))
    assert "up to 7.629 MiB more than planned, on d1" in "\n".join(
        export_plan(plan, "torch-csv").notes
    )


def test_recomputation_is_valued_as_worked_out_by_hand() -> None:
    """On one device: 9 layers of 3 s a microbatch, one second more for each that runs again."""
    pipeline = placed(titan_graph(), [], ("d0",), {0: ["layers.0"]}, microbatches=1)
    notes = "\n".join(export_plan(in_order(pipeline), "torch-csv").notes)
    assert "everything fits and takes 27 s predicted instead of 28 s (-3.6%)" in notes
    assert "with every layer recomputed 35 s predicted instead of 28 s (+25.0%)" in notes


def test_it_is_said_where_nothing_fits_without_recomputation() -> None:
    """Stashes of 9 GB, less one that is recomputed, on 8.7 GiB = 9.3 GB with all else in it."""
    pipeline = placed(
        titan_graph(), [], ("d0",), {0: ["layers.0"]}, memory_gib=8.25, microbatches=1
    )
    notes = "\n".join(export_plan(in_order(pipeline), "torch-csv").notes)
    assert re.search(r"Without recomputation d0 needs 8\.\d+ GiB of 8.25 GiB", notes)
