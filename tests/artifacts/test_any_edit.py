"""Whatever stands in a file: it is refused with named problems, or read and judged."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_plan import PLAN, a_plan, refusal
from strategies import json_values

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.records.document import read_json
from planner.verification import verify


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The path of every value inside plain data."""
    inner: list[tuple] = []
    if isinstance(value, dict):
        inner = [place for key in value for place in places(value[key], (*path, key))]
    if isinstance(value, list):
        inner = [place for i, one in enumerate(value) for place in places(one, (*path, i))]
    return [path, *inner]


def edited(data: Any, draw: Callable[[st.SearchStrategy], Any]) -> Any:
    """A copy with one to three values replaced, removed, doubled or exchanged."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        known = [path for path in places(data) if path]
        if not known:
            return data
        path = draw(st.sampled_from(known))
        holder = data
        for key in path[:-1]:
            holder = holder[key]
        key, old = path[-1], holder[path[-1]]
        match draw(st.integers(0, 5)):
            case 0:
                holder[key] = draw(json_values)
            case 1:
                del holder[key]
            case 2 if isinstance(holder, list):
                holder.append(old)
            case 3:
                other = draw(st.sampled_from(known))
                value = data
                for step in other:
                    value = value[step]
                holder[key] = copy.deepcopy(value)
            case 4 if isinstance(old, int):
                holder[key] = old + draw(st.sampled_from([-1, 1, 10**5, -(10**5)]))
            case 5 if isinstance(old, list | str):
                holder[key] = old[: len(old) // 2]
            case _:
                holder[key] = draw(st.sampled_from(["d0", "d1", "d2", "a", "b", 0, 1, -1, 0.5]))
    return data


def read_or_refused(read: Callable[[Any, str], Any], changed: Any) -> Any:
    """What was read, or None if it was refused as it should be: by named problems of the file."""
    try:
        return read(changed, "edited")
    except PipeplanError as refused:
        problems = refused.problems
    assert problems
    assert all(problem.startswith("edited: ") for problem in problems)
    return None


@pytest.mark.parametrize("number", [1, 2])
@given(data=st.data())
def test_any_edit_of_a_plan_is_refused_or_read_and_judged(number: int, data: st.DataObject) -> None:
    """Nothing but lists of problems ever comes out of reading and verifying."""
    changed = edited({**PLAN, "format": f"pipeplan/{number}"}, data.draw)
    plan = read_or_refused(Plan.parse, changed)
    if plan is None:
        return
    problems = verify(plan)
    assert all(isinstance(problem, str) and problem for problem in problems)
    assert json.loads(plan.model_dump_json()) == plan.model_dump(mode="json")


@given(st.data())
def test_any_edit_of_a_cluster_is_refused_or_read(data: st.DataObject) -> None:
    changed = edited(PLAN["cluster"], data.draw)
    found = read_or_refused(Cluster.from_data, changed)
    if found is None:
        return
    for source in found.device_names:
        for target in found.device_names:
            route = found.route(source, target)
            assert route is None or route.bandwidth_gb_per_s > 0


@given(st.data())
def test_any_edit_of_a_layer_graph_is_refused_or_read(data: st.DataObject) -> None:
    changed = edited(PLAN["model"]["graph"], data.draw)
    found = read_or_refused(LayerGraph.parse, changed)
    if found is None:
        return
    assert LayerGraph.parse(json.loads(found.record.model_dump_json())).record == found.record


@pytest.mark.parametrize("text", ['{"format": "\\ud800"}', '{"\\ud800": 1}'])
def test_half_a_character_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert refusal(Plan.load, path)
    changed = {**PLAN, "ranks": ["\ud800"]}
    path.write_text(json.dumps(changed))
    assert refusal(Plan.load, path)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    assert read_json(path) == PLAN
    assert Plan.load(path) == a_plan()
