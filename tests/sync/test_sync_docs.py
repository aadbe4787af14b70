"""What docs/synchronisation.md says of strategies, against the code."""

import re
from pathlib import Path

import pytest
from small_worlds import pipeline_world

from planner.errors import PipeplanError
from planner.sync.choice import APPROXIMATE, EXACT
from planner.sync.simulation.calibration import calibrated
from planner.sync.simulation.run import Scenario, trace_sync
from planner.sync.strategies import OPTIONS, parse_sync, sync_name

DOCS = (Path(__file__).parents[2] / "docs" / "synchronisation.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return DOCS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def documented_options() -> dict[str, dict[str, str]]:
    """Defaults by strategy and option."""
    found: dict[str, dict[str, str]] = {}
    for line in section("Options").splitlines():
        row = re.match(r"\| (?:`(\w+)` )?\| `(\w+)` \| (\S+) \|", line)
        if row:
            strategy = row[1] or list(found)[-1]
            found.setdefault(strategy, {})[row[2]] = row[3]
    return found


def test_the_docs_have_every_strategy_s_options_in_order() -> None:
    found = {name: list(options) for name, options in documented_options().items()}
    assert found == {name: list(kind.model_fields) for name, kind in OPTIONS.items()}


def test_the_docs_have_the_defaults() -> None:
    for name, options in documented_options().items():
        for option, default in options.items():
            read = {"none": None, "true": True, "false": False}.get(default, default)
            real = OPTIONS[name].model_fields[option].default
            assert read == real or float(default) == real, f"{name}: {option}"


def test_the_docs_name_the_candidates_of_a_choice() -> None:
    told = DOCS.partition("Candidates of the choice are")[2].partition("\n")[0]
    for sync in (*EXACT, *APPROXIMATE):
        assert f"`{sync_name(sync)}`" in told


@pytest.mark.parametrize("tells", ["yes", "no"])
def test_the_docs_know_whose_traces_tell_something(tells: str) -> None:
    table = DOCS.partition("| A trace of |")[2].partition("\n\n")[0]
    rows = re.findall(rf"^\| (`.*`) \| {tells}\b", table, re.MULTILINE)
    names = [name for row in rows for name in re.findall("`([^`]+)`", row)]
    assert len(names) >= 4
    world = pipeline_world()
    for name in names:
        trace = trace_sync(Scenario(world, 20), parse_sync(name))[1]
        if tells == "yes":
            calibrated(world, trace)
        else:
            with pytest.raises(PipeplanError, match="does not show how long"):
                calibrated(world, trace)
