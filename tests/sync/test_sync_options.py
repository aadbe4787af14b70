"""Options of strategies: what is read, what is refused, and what is said of it."""

import pytest
from small_worlds import run_of, small_world

from planner.errors import PipeplanError
from planner.plan.plan import Sync
from planner.sync.groups import scheduler_of
from planner.sync.groups.events import GroupRequest
from planner.sync.strategies import (
    EXAMPLE,
    OPTIONS,
    AllReduceOptions,
    EagerParameterServerOptions,
    PartialAllReduceOptions,
    group_size_of,
    option_kinds,
    options_of,
    parse_sync,
    require_fit,
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "ad_psgd:mode=sync",
            "sync.options of ad_psgd: 'mode' is not one of its options; they are pairs (bipartite "
            "or matching)",
        ),
        ("all_reduce:overlap=0", "sync.options of all_reduce: overlap: expected true or false (f"),
        (
            "parameter_server:mode=async,mode=sync",
            "sync: mode is given twice in 'parameter_server:mode=async,mode=sync', as async and "
            "as sync; give it once",
        ),
        (
            "partial_all_reduce:schedule=static,group_size=4",
            "sync.options of partial_all_reduce: group_size with schedule = 'static', which "
            "draws no groups; remove it, or use schedule = 'generator'",
        ),
        (
            "partial_all_reduce:schedule=static,seed=1,inter_intra=true",
            "sync.options of partial_all_reduce: inter_intra, seed with schedule = 'static', "
            "which draws no groups; remove them",
        ),
        (
            "partial_all_reduce:pipelines_per_node=2",
            "sync.options of partial_all_reduce: pipelines_per_node with groups drawn",
        ),
        (
            "partial_all_reduce:slowdown_filter=none,filter_between=initiator",
            "sync.options of partial_all_reduce: filter_between with slowdown_filter = none",
        ),
        (
            "partial_all_reduce:group_division=false,filter_between=all",
            "sync.options of partial_all_reduce: filter_between without group_division",
        ),
        ("wave_synchronous:distance=-1", "sync.options of wave_synchronous: distance"),
        (
            "partial_all_reduce:inter_intra=true,group_size=2",
            "sync.options of partial_all_reduce: group_size with inter_intra",
        ),
        (
            "eager_parameter_server:modulation=inverse,decay=3",
            "sync.options of eager_parameter_server: decay with modulation = 'inverse', which",
        ),
        ("ad_psgd:matching", "sync: 'matching' in 'ad_psgd:matching' is not OPTION=VALUE; write "),
    ],
)
def test_options_without_sense_are_refused(text: str, told: str) -> None:
    with pytest.raises(PipeplanError) as raised:
        parse_sync(text)
    assert str(raised.value).startswith(told)


def test_the_example_that_messages_offer_can_be_read() -> None:
    assert parse_sync(EXAMPLE).options


def test_every_wrong_option_is_named_at_once() -> None:
    with pytest.raises(PipeplanError) as raised:
        options_of(Sync(strategy="ad_psgd", options={"pairs": "all", "mode": "sync", "x": 1}))
    assert [problem.split(": ")[1][:6] for problem in raised.value.problems] == [
        "'mode'",
        "'x' is",
        "pairs",
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_s_kind_can_be_said(name: str) -> None:
    said = option_kinds(OPTIONS[name])
    assert all(f"{option} (" in said for option in OPTIONS[name].model_fields)


@pytest.mark.parametrize("word", ["False", "false", "FALSE"])
def test_true_and_false_are_read_in_any_case(word: str) -> None:
    assert options_of(parse_sync(f"all_reduce:overlap={word}")) == AllReduceOptions(overlap=False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("parameter_server:servers=9", "servers: 9, but there are 4 pipelines, which are the serv"),
        ("wave_synchronous:servers=5", "servers: 5, but there are 4 pipelines"),
        ("eager_parameter_server:servers=5", "servers: 5, but there are 4 pipelines"),
        (
            "partial_all_reduce:schedule=static,pipelines_per_node=3",
            "pipelines_per_node: 3 does not divide the 4 pipelines into whole nodes",
        ),
        (
            "partial_all_reduce:inter_intra=true,pipelines_per_node=8",
            "pipelines_per_node: 8 does not divide the 4 pipelines into whole nodes",
        ),
    ],
)
def test_what_so_many_pipelines_cannot_have_is_refused(text: str, told: str) -> None:
    sync = parse_sync(text)
    for refuse in (lambda: require_fit(sync, 4), lambda: run_of(text, small_world(4))):
        with pytest.raises(PipeplanError) as raised:
            refuse()
        assert str(raised.value).startswith(f"sync.options of {sync.strategy}: {told}")
    require_fit(sync, 120)
    require_fit(sync, None)


@pytest.mark.parametrize(
    "text", ["partial_all_reduce:group_size=5", "semi_decentralized:most_members=9"]
)
def test_groups_above_the_number_of_pipelines_mean_all(text: str) -> None:
    require_fit(parse_sync(text), 4)


def test_groups_are_of_three_or_half_of_the_pipelines() -> None:
    usual = PartialAllReduceOptions()
    assert [group_size_of(usual, count) for count in (2, 3, 4, 5, 6, 64)] == [2, 2, 2, 2, 3, 3]
    assert group_size_of(PartialAllReduceOptions(group_size=4), 4) == 4


def test_a_division_of_four_pipelines_leaves_nobody_alone() -> None:
    scheduler = scheduler_of(PartialAllReduceOptions(), 4, 1)
    groups = [g for worker in range(4) for g in scheduler.handle(GroupRequest(worker, 0, 1), 0)]
    assert [len(group.members) for group in groups] == [2, 2]


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ("modulation=inverse", [1, 2 / 3, 1 / 2, 1 / 5]),
        ("modulation=exponential", [1, 0.7788, 0.6065, 0.1353]),
        ("modulation=constant", [1, 1, 1, 1]),
    ],
)
def test_modulations_differ_among_equals_and_for_a_slow_pipeline(
    options: str, factors: list[float]
) -> None:
    """Of eight: nothing newer, half of the others, all of them, and four times as many."""
    found = options_of(parse_sync(f"eager_parameter_server:{options}"))
    assert isinstance(found, EagerParameterServerOptions)
    assert [found.factor(newer, 8) for newer in (0, 4, 8, 32)] == pytest.approx(factors, abs=1e-4)
