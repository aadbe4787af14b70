"""A plan of two layers on two devices, and how a wrong file is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import boundary, cluster, graph, layer, link, orders, parameter, pipeline

from planner.assembly import plan_by_hand
from planner.errors import PipeplanError
from planner.plan.plan import Plan


def refusal(load: Callable[[Path], object], path: Path) -> str:
    with pytest.raises(PipeplanError) as raised:
        load(path)
    text = str(raised.value)
    for problem in raised.value.problems:
        assert problem.startswith(f"{path}: ")
        assert "\n" not in problem
    return text


def a_plan() -> Plan:
    rows = [layer("a", parameters=["w"]), layer("b", stash_bytes=5)]
    machines = cluster(["d0", "d1"], [link("d0", "d1")])
    the_graph = graph(rows, [boundary("a", "b")], [parameter("w")])
    placed = pipeline(the_graph, machines, [(["a"], ["d0"]), (["b"], ["d1"])])
    return plan_by_hand(placed, orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1"))


PLAN = json.loads(a_plan().model_dump_json())
