"""The log of a run brings its scheduler back, and says where it cannot be right."""

import pytest
from group_world import Setting, any_options, run, settings_of
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import PipeplanError
from planner.sync.groups import scheduler_of
from planner.sync.groups.events import Group, Request
from planner.sync.ledger import Committed, Dropped, GivenBack, Taken
from planner.sync.log import Entry, bring_back, line_of, read_log
from planner.sync.strategies import Options, SemiDecentralizedOptions


@given(settings_of(), any_options, st.data())
def test_a_scheduler_that_is_brought_back_decides_as_its_predecessor_would(
    setting: Setting, options: Options, data: st.DataObject
) -> None:
    log = run(setting, options).log
    length = data.draw(st.integers(0, len(log)))
    first = scheduler_of(options, setting.workers, setting.keys)
    lines = []
    groups: list[Group] = []
    for event, now_s in log[:length]:
        lines.append(line_of(Entry(now_s, event)) + "\n")
        groups = first.handle(event, now_s)
        lines += [line_of(Entry(now_s, group)) + "\n" for group in groups]
    told = data.draw(st.integers(0, len(groups)))
    lines = lines[: len(lines) - len(groups) + told]
    second = scheduler_of(options, setting.workers, setting.keys)
    assert bring_back(second, read_log(lines, "log")) == groups[told:]
    assert second.deadline_s == first.deadline_s
    for event, now_s in log[length:]:
        assert second.handle(event, now_s) == first.handle(event, now_s)


def test_every_line_is_read_as_it_was_written() -> None:
    entries = [
        Entry(0.5, Taken(0, 1, 2)),
        Entry(1.0, Committed(0, 2)),
        Entry(1.0, GivenBack(0)),
        Entry(1.0, Dropped(3)),
        Entry(2.0, Group(0, 1, (0, 2), (3, 4))),
        Entry(2.5, Request(0, 1, 3)),
    ]
    lines = [line_of(entry) + "\n" for entry in entries]
    assert lines[-1] == '{"at_s": 2.5, "request": {"worker": 0, "key": 1, "iteration": 3}}\n'
    assert list(read_log(lines, "log")) == entries
    assert bring_back(scheduler_of(SemiDecentralizedOptions(), 1, 1), entries[:4]) == []


GOOD = '{"at_s": 0, "left": {"worker": 0}}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("\n", "Expecting value"),
        ('{"at_s": 0, "left": {"worker": 0}', "Expecting"),
        ("[1]", "not 'at_s' and one thing"),
        ('{"at_s": 0}', "not 'at_s' and one thing"),
        ('{"at_s": 0, "rest": {}}', "'rest' is not known; expected one of request"),
        ('{"at_s": NaN, "left": {"worker": 0}}', "at_s: nan is not a finite number"),
        ('{"at_s": true, "left": {"worker": 0}}', "at_s: True is not"),
        ('{"at_s": 0, "left": {}}', "has not just the fields worker"),
        ('{"at_s": 0, "left": {"worker": -1}}', "left.worker: -1 is not a whole number"),
        ('{"at_s": 0, "left": {"worker": 1.0}}', "left.worker: 1.0 is not a whole number"),
        ('{"at_s": 0, "left": {"worker": 1, "worker": 1}}', "a field stands there twice"),
        (
            '{"at_s": 0, "group": {"number": 0, "key": 0, "members": 1, "iterations": []}}',
            "group.members: 1 is not a list",
        ),
        ("[" * 100_000, "recursion"),
        (" " * 2**20 + GOOD, "characters; expected at most"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str) -> None:
    with pytest.raises(PipeplanError, match=f"log: line 2: .*{message}"):
        list(read_log([GOOD, line], "log"))


def test_a_cut_last_line_is_left_out_where_that_is_allowed() -> None:
    assert len(list(read_log([GOOD, GOOD[:20]], "log", may_be_cut=True))) == 1


def test_a_log_of_other_options_is_refused() -> None:
    entries = [Entry(0, Request(0, 0, 1)), Entry(0, Group(0, 0, (0,), (1,)))]
    with pytest.raises(PipeplanError, match=r"entry 2: .*the scheduler now decides None"):
        bring_back(scheduler_of(SemiDecentralizedOptions(), 2, 1), entries)
    entries = [Entry(0, Request(0, 0, 1)), Entry(0, Request(0, 0, 2))]
    with pytest.raises(PipeplanError, match=r"entry 2: .* follows where the scheduler now decides"):
        bring_back(scheduler_of(SemiDecentralizedOptions(), 1, 1), entries)
