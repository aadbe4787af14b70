"""The pipelines of a plan, and each as a plan of its own."""

from __future__ import annotations

import pytest
from builders import boundary, graph, layer, orders, pipeline, star

from executor.elastic.setup import pipeline_replica_plan
from planner import Problem, solve
from planner.assembly import plan_by_hand
from planner.cli.sync import require_sync, with_sync
from planner.errors import PipeplanError
from planner.plan.plan import Plan, Sync
from planner.sync.pipeline_replicas import pipeline_replicas_of
from planner.sync.simulation.planned import from_plan
from planner.verification import verify

GRAPH = graph([layer("a"), layer("b")], [boundary("a", "b")])
TWO_STAGES = [(["a"], ["d0", "d1"]), (["b"], ["d2", "d3"])]


def plan(stages: list[tuple], microbatches: int = 4, **texts: str) -> Plan:
    made = pipeline(GRAPH, star(4), stages, microbatches=microbatches)
    return plan_by_hand(made, orders(**texts))


def side_by_side() -> Plan:
    return plan(
        TWO_STAGES,
        d0="0F0 0F2 0B0 0B2",
        d1="0F1 0F3 0B1 0B3",
        d2="1F0 1B0 1F2 1B2",
        d3="1F1 1B1 1F3 1B3",
    )


def test_replicas_that_keep_their_microbatches_are_pipelines() -> None:
    lanes = pipeline_replicas_of(side_by_side())
    assert [lane.devices for lane in lanes] == [("d0", "d2"), ("d1", "d3")]
    assert [lane.microbatches for lane in lanes] == [(0, 2), (1, 3)]


def test_each_pipeline_is_a_valid_plan_of_its_own() -> None:
    whole = side_by_side()
    for lane in pipeline_replicas_of(whole):
        alone = pipeline_replica_plan(whole, lane)
        assert verify(alone) == []
        assert alone.microbatches == 2
        assert alone.ranks == lane.devices
        assert alone.sync.strategy == "all_reduce"
    assert (
        pipeline_replica_plan(whole, pipeline_replicas_of(whole)[1]).orders["d3"]
        == "1F0 1B0 1F1 1B1"
    )


def test_each_pipeline_of_a_plan_with_a_certificate_is_a_valid_plan_of_its_own() -> None:
    """The whole plan's bound and its certificate are not the pipeline's."""
    made = pipeline(GRAPH, star(4), TWO_STAGES, microbatches=4).problem
    job = made.job.model_copy(update={"equal_pipelines": True})
    found = solve(Problem(made.graph, made.cluster, job), time_limit_s=1, deterministic=True)
    whole = found.plan
    assert whole.proof is not None
    for lane in pipeline_replicas_of(whole):
        assert verify(pipeline_replica_plan(whole, lane)) == []


def refused(the_plan: Plan) -> str:
    with pytest.raises(PipeplanError) as raised:
        pipeline_replicas_of(the_plan)
    return str(raised.value)


def test_replicas_that_exchange_microbatches_are_no_pipelines() -> None:
    crossed = plan(
        TWO_STAGES,
        d0="0F0 0F2 0B0 0B2",
        d1="0F1 0F3 0B1 0B3",
        d2="1F0 1B0 1F1 1B1",
        d3="1F2 1B2 1F3 1B3",
    )
    assert "orders: microbatches 0 and " in refused(crossed)
    assert "all_reduce" in refused(crossed)


def test_stages_with_different_numbers_of_replicas_are_no_pipelines() -> None:
    uneven = plan(
        [(["a"], ["d0", "d1"]), (["b"], ["d2"])],
        d0="0F0 0F2 0B0 0B2",
        d1="0F1 0F3 0B1 0B3",
        d2="1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    )
    assert "stages: they have different numbers of replicas (0: 2, 1: 1)" in refused(uneven)


def test_pipelines_take_shares_of_one_size() -> None:
    lopsided = plan(
        TWO_STAGES,
        d0="0F0 0F2 0F3 0B0 0B2 0B3",
        d1="0F1 0B1",
        d2="1F0 1B0 1F2 1B2 1F3 1B3",
        d3="1F1 1B1",
    )
    assert "orders: pipelines run different numbers of microbatches (1 to 3)" in refused(lopsided)


def test_a_plan_without_pipelines_keeps_its_strategy_and_says_why() -> None:
    alone = plan([(["a", "b"], ["d0"])], d0="0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3")
    kept, reason = with_sync(alone, "choose")
    assert kept is alone
    assert reason.startswith(
        "all_reduce is kept; there is nothing to choose: workers: one pipeline"
    )


def test_a_strategy_is_chosen_for_the_pipelines_of_a_plan() -> None:
    chosen, reason = with_sync(side_by_side(), "choose")
    assert reason.startswith(chosen.sync.strategy)
    assert verify(chosen) == []


def test_a_strategy_that_is_none_is_refused_before_any_work() -> None:
    with pytest.raises(PipeplanError, match=r"sync.strategy: 'al_reduce' is not known"):
        require_sync("al_reduce")


UNEVEN = {"d0": "0F0 0F2 0B0 0B2", "d1": "0F1 0F3 0B1 0B3", "d2": "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"}


def test_the_message_offers_a_command_that_exists_and_the_strategies_in_step() -> None:
    uneven = plan([(["a"], ["d0", "d1"]), (["b"], ["d2"])], **UNEVEN)
    said = refused(uneven)
    assert "plan with `pipeplan plan … --sync semi_decentralized`" in said
    assert said.endswith("or use one of all_reduce, fused, decoupled, cross_iteration")


def test_a_simulation_of_pipelines_does_not_offer_the_strategy_it_was_asked_for() -> None:
    uneven = plan([(["a"], ["d0", "d1"]), (["b"], ["d2"])], **UNEVEN)
    with pytest.raises(PipeplanError) as raised:
        from_plan(uneven)
    assert "--sync semi_decentralized" in str(raised.value)
    assert "all_reduce" not in str(raised.value)


def test_a_plan_whose_strategy_needs_pipelines_holds_only_if_it_has_some() -> None:
    sync = Sync(strategy="semi_decentralized")
    assert verify(side_by_side().model_copy(update={"sync": sync})) == []
    uneven = plan([(["a"], ["d0", "d1"]), (["b"], ["d2"])], **UNEVEN)
    (problem,) = verify(uneven.model_copy(update={"sync": sync}))
    assert problem.startswith("sync.strategy: 'semi_decentralized' needs pipelines, but stages: ")


def test_all_strategies_at_once_are_no_plan() -> None:
    with pytest.raises(PipeplanError, match="pipeplan simulate PLAN --sync all"):
        require_sync("all")
