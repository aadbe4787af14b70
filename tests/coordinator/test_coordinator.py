"""The coordinator: every share is trained once, whoever dies, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from coordinated_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.coordinator.messages import Ask, Hello, Loss, Lost, Take, Write, Wrote
from executor.coordinator.state import Coordinator
from executor.coordinator.work import CoordinatorWork, coordinator_for
from planner.sync.strategies import parse_sync

STRATEGIES = [
    "semi_decentralized",
    "semi_decentralized:guarantee_period=1",
    "semi_decentralized:overlap=true",
    "semi_decentralized:overlap=true,guarantee_period=1",
    "partial_all_reduce",
    "partial_all_reduce:overlap=true",
    "partial_all_reduce:schedule=static",
    "partial_all_reduce:group_division=false",
    "parameter_server",
    "wave_synchronous:distance=0",
    "wave_synchronous:distance=2",
    "ad_psgd:pairs=matching",
    "ad_psgd",
]


def coordinator(strategy: str, pipelines: int, places: int, shares: int) -> Coordinator:
    return coordinator_for(CoordinatorWork(pipelines, places, shares, parse_sync(strategy), 2))


@settings(max_examples=20, deadline=None)
@given(
    strategy=st.sampled_from(STRATEGIES),
    pipelines=st.integers(1, 5),
    places=st.integers(1, 3),
    shares=st.integers(0, 25),
    deaths=st.integers(0, 4),
    seed=st.integers(0, 10**6),
)
def test_every_share_is_committed_once_and_all_ranks_end(
    strategy: str, pipelines: int, places: int, shares: int, deaths: int, seed: int
) -> None:
    world = World(coordinator(strategy, pipelines, places, shares), pipelines, places, seed, deaths)
    world.run()
    report = world.coordinator.report()
    if world.refused and report["remaining"]:
        # All pipelines died at once: nobody has the weights, and those who come are told so.
        assert deaths
        assert world.coordinator.is_stranded
        return
    assert not world.coordinator.is_stranded
    assert report["committed"] == shares
    trained = Counter(share for share, _, place in world.trained if place == 0)
    assert set(trained) == set(range(shares))
    if not deaths:
        assert set(trained.values()) <= {1}
        assert report["repeated"] == 0


@settings(max_examples=20, deadline=None)
@given(strategy=st.sampled_from(STRATEGIES), seed=st.integers(0, 10**6))
def test_the_log_of_its_messages_brings_it_back(strategy: str, seed: int) -> None:
    world = World(coordinator(strategy, 4, 2, 20), 4, 2, seed, deaths=2)
    world.run()
    again = coordinator(strategy, 4, 2, 20)
    for message, at_s in world.messages:
        again.handle(message, at_s)
    assert again.report() == world.coordinator.report()
    assert again.watched() == world.coordinator.watched()


def begun(strategy: str = "semi_decentralized", shares: int = 10) -> Coordinator:
    """Two pipelines of one place, both with their first share."""
    made = coordinator(strategy, 2, 1, shares)
    for pipeline in (0, 1):
        made.handle(Hello(pipeline=pipeline, place=0, incarnation_id=f"n{pipeline}"), 0.0)
    for pipeline in (0, 1):
        made.handle(Take(pipeline=pipeline, place=0, incarnation_id=f"n{pipeline}", step=1), 0.0)
    return made


def test_a_pipeline_that_was_given_up_is_fenced() -> None:
    made = begun()
    made.handle(Lost(pipeline=1, incarnation_id="n1"), 1.0)
    (answer,) = made.handle(Ask(pipeline=1, place=0, incarnation_id="n1", step=1), 1.1)
    assert answer.to == (1, 0, "n1")
    assert answer.body == {"kind": "fenced", "incarnation_id": "n1"}


def test_who_comes_back_copies_the_weights_of_a_donor_before_one_step() -> None:
    made = begun()
    made.handle(Lost(pipeline=1, incarnation_id="n1"), 1.0)
    (welcome,) = made.handle(Hello(pipeline=1, place=0, incarnation_id="back"), 2.0)
    assert welcome.body == {"kind": "welcome", "step": 2, "donor": [0, 1], "incarnation": 2}
    made.handle(Ask(pipeline=0, place=0, incarnation_id="n0", step=1), 2.1)
    (share,) = made.handle(Take(pipeline=0, place=0, incarnation_id="n0", step=2), 2.2)
    assert share.body["snapshot"]


def test_nobody_starts_from_the_beginning_once_all_weights_are_lost() -> None:
    made = begun()
    for pipeline in (0, 1):
        assert not made.is_stranded
        made.handle(Lost(pipeline=pipeline, incarnation_id=f"n{pipeline}"), 1.0)
    assert made.is_stranded
    (answer,) = made.handle(Hello(pipeline=0, place=0, incarnation_id="back"), 2.0)
    assert answer.body["kind"] == "refused"
    assert "resume from a checkpoint" in answer.body["why"]


def test_who_has_copied_weights_may_go_on_though_its_donor_is_lost() -> None:
    made = begun()
    made.handle(Lost(pipeline=1, incarnation_id="n1"), 1.0)
    made.handle(Hello(pipeline=1, place=0, incarnation_id="back"), 2.0)
    made.handle(Lost(pipeline=0, incarnation_id="n0"), 2.1)
    assert not made.is_stranded
    (share,) = made.handle(Take(pipeline=1, place=0, incarnation_id="back", step=2), 2.2)
    assert share.body["share"] is not None
    made.handle(Lost(pipeline=1, incarnation_id="back"), 3.0)
    assert made.is_stranded


@pytest.mark.parametrize("place", [1, 7])
def test_a_place_that_the_plan_has_not_is_refused(place: int) -> None:
    (answer,) = begun().handle(Hello(pipeline=0, place=place, incarnation_id="x"), 0.0)
    assert answer.body["kind"] == "refused"


def test_the_loss_is_the_mean_of_the_pipelines_last_losses_and_the_same_at_all_places() -> None:
    made = coordinator("ad_psgd", 2, 2, 10)
    ranks = [{"pipeline": n, "place": p, "incarnation_id": f"n{n}"} for n in (0, 1) for p in (0, 1)]
    for rank in ranks:
        made.handle(Hello(**rank), 0.0)

    def told(rank: int, step: int, loss: float | None) -> float | None:
        (answer,) = made.handle(Loss(**ranks[rank], step=step, loss=loss), 1.0)
        assert answer.body["step"] == step
        return answer.body["mean"]

    assert told(0, 1, 4.0) == 4.0
    assert told(2, 1, 2.0) == 3.0
    assert told(1, 1, 4.0) == 4.0
    assert told(0, 2, 1.0) == 1.5
    assert told(2, 2, None) == 1.0
    made.handle(Lost(pipeline=0, incarnation_id="n0"), 2.0)
    assert told(3, 3, 7.0) == 7.0


def writes(made: Coordinator, pipeline: int, name: str, step: int) -> bool:
    rank = {"pipeline": pipeline, "place": 0, "incarnation_id": name}
    (answer,) = made.handle(Write(**rank, step=step), 1.0)
    return bool(answer.body["writes"])


def wrote(made: Coordinator, pipeline: int, name: str, step: int, *, done: bool = True) -> None:
    rank = {"pipeline": pipeline, "place": 0, "incarnation_id": name}
    made.handle(Wrote(**rank, step=step, done=done), 1.0)


def test_one_pipeline_at_a_time_writes_and_no_step_twice_or_after_a_later_one() -> None:
    made = begun()
    assert writes(made, 1, "n1", 40)
    assert not writes(made, 0, "n0", 45)
    wrote(made, 1, "n1", 40)
    for step, expected in ((40, False), (35, False), (41, True)):
        assert writes(made, 0, "n0", step) == expected
    wrote(made, 0, "n0", 41)
    assert not writes(made, 1, "n1", 41)


def test_a_write_that_failed_or_whose_pipeline_is_lost_leaves_the_step_to_others() -> None:
    made = begun()
    assert writes(made, 0, "n0", 40)
    wrote(made, 0, "n0", 40, done=False)
    assert writes(made, 1, "n1", 40)
    made.handle(Lost(pipeline=1, incarnation_id="n1"), 1.0)
    assert writes(made, 0, "n0", 40)
