"""Commands say what a plan's time rests on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import cluster, graph, layer, link, orders, pipeline
from commands import pipeplan

from planner.assembly import plan_by_hand

MEASURED = {"unit": {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}}
# 3 s of the efficiency of a datasheet, 3 s measured, 2 s of measured links.
LINE = (
    "time provenance: 62.5% of the iteration time comes from measured figures, 0.0% from "
    "datasheets, 37.5% from assumptions"
)


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    rows = [layer("a", 1, 2), layer("b", measured=MEASURED)]
    machines = cluster(["d0", "d1"], [link("d0", "d1", source="measured")])
    placed = pipeline(graph(rows), machines, [(["a"], ["d0"]), (["b"], ["d1"])], microbatches=1)
    plan_by_hand(placed, orders(d0="0F0 0B0", d1="1F0 1B0")).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize("command", ["simulate", "explain"])
def test_the_line_is_printed(command: str, plan_path: Path) -> None:
    result = pipeplan(command, plan_path)
    assert result.exit_code == 0
    assert LINE in result.stdout.splitlines()


@pytest.mark.parametrize("command", ["simulate", "explain"])
def test_programs_get_the_shares(command: str, plan_path: Path) -> None:
    report = json.loads(pipeplan(command, plan_path, "--json").stdout)
    assert report["time_provenance"] == pytest.approx(
        {"measured": 0.625, "datasheet": 0, "assumed": 0.375}
    )


def test_a_plan_without_the_shares_still_holds(plan_path: Path) -> None:
    data = json.loads(plan_path.read_text())
    assert data["predicted"].pop("time_provenance")["assumed"] == pytest.approx(0.375)
    plan_path.write_text(json.dumps(data))
    assert pipeplan("verify", plan_path).exit_code == 0
    data["predicted"]["time_provenance"] = {"measured": 1.0, "datasheet": 0.0, "assumed": 0.0}
    plan_path.write_text(json.dumps(data))
    refused = pipeplan("verify", plan_path)
    assert refused.exit_code == 1
    assert (
        "predicted.time_provenance.measured: the plan says 1.0, a simulation gives 0.625"
        in refused.stderr
    )
