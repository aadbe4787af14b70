"""`pipeplan schedule`: a plan's own stages in a better order."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import graph, layer, orders, pipeline, star
from commands import pipeplan

from planner import Plan, verify
from planner.assembly import plan_by_hand
from planner.costs.placement import place_plan
from planner.search.orders.search import search_schedule
from planner.simulation.simulator import simulate


def slow_plan(path: Path) -> Plan:
    """Two stages, one microbatch after the other."""
    placed = pipeline(
        graph([layer("a"), layer("b")]), star(2), [("a", ["d0"]), ("b", ["d1"])], microbatches=4
    )
    one_by_one = [f"{{0}}F{m} {{0}}B{m}" for m in range(4)]
    text = {f"d{s}": " ".join(word.format(s) for word in one_by_one) for s in range(2)}
    plan = plan_by_hand(placed, orders(**text))
    plan.save(path)
    return plan


def test_the_orders_get_better_and_the_stages_stay(tmp_path: Path) -> None:
    path, better = tmp_path / "plan.json", tmp_path / "better.json"
    before = slow_plan(path)
    result = pipeplan("plan", path, "-o", better, "--deterministic", "--time-limit", 0.3)
    assert result.exit_code == 0, result.output
    after = Plan.load(better)
    assert not verify(after)
    assert after.stages == before.stages
    assert after.predicted.iteration_time_s < before.predicted.iteration_time_s
    assert "lower bound for every schedule of these stages" in result.stdout


def test_split_backwards_are_no_slower(tmp_path: Path) -> None:
    path, found = tmp_path / "plan.json", {}
    slow_plan(path)
    for name, backward in (("whole", "whole"), ("split", "any")):
        output = tmp_path / f"{name}.json"
        data = json.loads(path.read_text())
        data["job"]["backward"] = backward
        path.write_text(json.dumps(data))
        words = ["plan", path, "-o", output, "--deterministic", "--time-limit", 0.3]
        made = pipeplan(*words, "--json")
        assert made.exit_code == 0, made.output
        found[name] = json.loads(made.stdout)
        assert not verify(Plan.load(output))
        kinds = {op.kind for row in Plan.load(output).parsed_orders().values() for op in row}
        assert kinds == ({"F", "I", "W"} if name == "split" else {"F", "B"})
        assert found[name]["schedule_lower_bound_s"] <= found[name]["iteration_time_s"]
    assert found["split"]["iteration_time_s"] <= found["whole"]["iteration_time_s"]


def test_old_orders_stay_if_nothing_faster_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, again = tmp_path / "plan.json", tmp_path / "again.json"
    slow_plan(path)
    pipeplan("plan", path, "-o", path, "--deterministic", "--time-limit", 0.3)
    good = Plan.load(path)
    slow = slow_plan(tmp_path / "slow.json")
    found = search_schedule(slow.problem, slow.stages, time_limit_s=0.1, deterministic=True)
    one_by_one = simulate(place_plan(slow), slow.parsed_orders())
    found = replace(found, timeline=one_by_one)
    monkeypatch.setattr("planner.search.orders.search.search_schedule", lambda *_, **__: found)
    result = pipeplan("plan", path, "-o", again)
    assert result.exit_code == 0, result.output
    assert Plan.load(again).orders == good.orders
    assert "the old orders stay" in result.stdout
    made = json.loads(pipeplan("plan", path, "-o", again, "--json").stdout)
    assert made["iteration_time_s"] == good.predicted.iteration_time_s
    assert made["method"] == "as before"


def test_wrong_input_is_told(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    slow_plan(path)
    assert pipeplan("plan", tmp_path / "none.json", "-o", path).exit_code == 1
    result = pipeplan("plan", path, "-o", tmp_path / "x.json", "--time-limit", -1)
    assert result.exit_code == 1
    assert "--time-limit: " in result.stderr
    assert not (tmp_path / "x.json").exists()
