"""What exports say of plans whose gradients are reduced while the last backwards run."""

import pytest
from builders import GIGA
from export_plans import in_order, placed, titan_graph

from planner.interop.exported import export_plan
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan, Sync
from planner.prediction import with_strategy


def heavy_graph() -> LayerGraph:
    """Nine layers of a second forward and two backward; a weight of 1 GB in each but the loss."""
    data = titan_graph().record.model_dump(mode="json")
    for row in data["parameters"]:
        row.update(elements=GIGA // 4, bytes=GIGA)
    return LayerGraph.parse(data)


def two_pipelines() -> Plan:
    """A microbatch on each: forwards of 4 s and 5 s, backwards of 10 s and 8 s."""
    return in_order(placed(heavy_graph(), [4], ("d0 d1", "d2 d3"), microbatches=2))


def note_of(plan: Plan, runtime: str) -> list[str]:
    return [note for note in export_plan(plan, runtime).notes if note.startswith("gradients: ")]


@pytest.mark.parametrize("runtime", ["torchtitan", "deepspeed"])
def test_the_cost_of_reducing_later_is_that_worked_out_by_hand(runtime: str) -> None:
    """A gradient takes a second. Overlapped, one of the first stage's four is left at the end.

    The last gradient that is sent back shares a link with a reduction: 2 ms instead of 1.
    """
    plan = two_pipelines()
    assert plan.predicted.iteration_time_s == pytest.approx(27 + 1 + 2e-3 + 13e-3)
    (note,) = note_of(plan, runtime)
    assert note.endswith(
        "the plan reduces buckets while they run: 31.02 s predicted instead of 28.02 s (+10.7%)"
    )


@pytest.mark.parametrize("runtime", ["torchtitan", "deepspeed"])
def test_nothing_is_said_of_plans_that_reduce_later_themselves(runtime: str) -> None:
    plan = with_strategy(two_pipelines(), Sync(options={"overlap": False}))
    assert plan.predicted.iteration_time_s == pytest.approx(27 + 4 + 2e-3 + 13e-3)
    assert note_of(plan, runtime) == []
    one_bucket = with_strategy(two_pipelines(), Sync(options={"bucket_mib": 8000}))
    assert note_of(one_bucket, runtime) == []
