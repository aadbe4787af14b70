"""Seconds of a plan's iterations with emulated compute, however its ranks are launched."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.plan.plan import Plan

WARM_UP = 2
"""Steps that do not count."""


def emulated_times(plan: Plan, steps: int, launch: Callable[[Sequence[str]], None]) -> list[float]:
    """Seconds of each step but the first ones.

    Args:
        plan: what to run.
        steps: how many, those that do not count included.
        launch: runs ``python`` with these arguments as every rank, and raises if one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, metrics = Path(folder) / "plan.json", Path(folder) / "metrics.jsonl"
        plan.save(path)
        options = ["--emulate", "--steps", str(steps), "--metrics", str(metrics)]
        launch(["-m", "executor", str(path), *options])
        lines = metrics.read_text().splitlines()
    return [json.loads(line)["step_time_s"] for line in lines][WARM_UP:]
