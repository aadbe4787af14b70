"""Every source paper's synchronisation has its name, and says what runs and what differs."""

import logging

import pytest

from planner.cli.sync import require_sync
from planner.errors import PipeplanError
from planner.sync.papers import PAPERS
from planner.sync.strategies import OPTIONS, options_of, parse_sync

NAMES = ("sdpipe", "ripples", "prague", "ps_plus", "dear", "hetpipe", "ad_psgd")


@pytest.mark.parametrize("name", NAMES)
def test_a_paper_s_name_runs_its_strategy_and_says_what_differs(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sync = parse_sync(name)
    assert sync.strategy == PAPERS[name].runs.partition(":")[0]
    assert options_of(sync) == options_of(parse_sync(PAPERS[name].runs))
    with caplog.at_level(logging.WARNING, logger="planner.sync.papers"):
        require_sync(name)
    if name in OPTIONS:  # The strategy's own name: nobody asks what runs.
        assert caplog.messages == []
        return
    (line,) = caplog.messages
    assert all(words in line for words in PAPERS[name])


def test_names_of_strategies_are_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    for name in OPTIONS:
        require_sync(name)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("ripples", {"filter_between": "initiator"}),
        ("ripples:group_size=4", {"filter_between": "initiator", "group_size": 4}),
        ("ripples:filter_between=all", {"filter_between": "all"}),
        ("ripples:schedule=static", {"schedule": "static"}),
        ("hetpipe:distance=0", {"distance": 0}),
    ],
)
def test_given_options_come_before_those_of_the_paper(text: str, options: dict) -> None:
    assert parse_sync(text).options == options


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ripple", "--sync also takes sdpipe, ripples, prague, ps_plus, dear, hetpipe, ad_psgd"),
        ("sdpipe:distance=1", "'distance' is not one of its options"),
    ],
)
def test_what_no_paper_has_is_refused(text: str, words: str) -> None:
    with pytest.raises(PipeplanError, match=words):
        parse_sync(text)
