"""One run in a process of its own, started with the Python of the build that is measured.

``PYTHON -P worker.py TASK.json`` prints a JSON object. It imports only ``planner``'s public names,
so the same file runs with an earlier build. The clocks that a search reads count CPU seconds of the
process, all threads together: a limit of 20 s is 20 CPU seconds, whatever else the machine does.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from itertools import pairwise, product
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

WALL_S = time.monotonic
"""The clock on the wall, for the row alone."""
MOST_WALL = 50.0
"""CP-SAT may take so many times its CPU seconds on the wall."""


def main() -> None:
    """Run the task of a file and print what it came to."""
    task = json.loads(Path(sys.argv[1]).read_text())
    if task["clock"] == "cpu":
        time.monotonic = time.perf_counter = time.process_time
        _limit_cp_sat_by_cpu()
    action = {"solve": _solved, "schedule": _scheduled, "check": _checked}[task["action"]]
    try:
        found = action(task)
    except Exception as error:  # every failure of a build is a row of the table
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(found))


def _limit_cp_sat_by_cpu() -> None:
    """Let CP-SAT's limit count CPU seconds too, for which it only knows the wall clock."""
    from ortools.sat.python.cp_model import CpSolver

    solve = CpSolver.solve

    def solve_within(solver: Any, *arguments: Any) -> Any:
        limit_s, begin, done = solver.parameters.max_time_in_seconds, time.process_time(), Event()

        def watch() -> None:
            while not done.wait(0.02):
                if time.process_time() - begin >= limit_s:
                    solver.stop_search()

        watcher = Thread(target=watch)
        watcher.start()
        solver.parameters.max_time_in_seconds = MOST_WALL * limit_s
        try:
            return solve(solver, *arguments)
        finally:
            done.set()
            watcher.join()
            solver.parameters.max_time_in_seconds = limit_s

    CpSolver.solve = solve_within


def _known_job(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job that means the same in every build.

    Builds without rules in the job get them as constraints; builds that may sum gradients of 16-bit
    weights in float32 are told to sum them in that of the weights, as others always do.
    """
    from planner import Job

    given = dict(job)
    if job.get("precision") in ("float16", "bfloat16"):
        given = {"gradient_precision": "weights", **given}
    later = {"gradient_precision", "rules"}
    return {name: value for name, value in given.items() if name not in later - {*Job.model_fields}}


def problem_of(data: dict[str, Any]) -> Any:
    """Return the problem of graph, cluster, job and perhaps runtime, as data of their files."""
    from planner import Cluster, Job, LayerGraph, Problem

    rules = {"rules": data["rules"]} if data.get("rules") else {}
    problem = Problem(
        LayerGraph.parse(data["graph"]),
        Cluster.from_data(data["cluster"]),
        Job.parse(_known_job({**data["job"], **rules}), "job"),
    )
    if data.get("runtime"):
        rules = type(problem.runtime).parse(data["runtime"], "runtime")
        problem = Problem(problem.graph, problem.cluster, problem.job, runtime=rules)
    return problem


def _solved(task: dict[str, Any]) -> dict[str, Any]:
    """Return the plan's figures and the incumbents, each with the CPU seconds it took."""
    from planner import PipeplanError, solve

    problem, curve = problem_of(task["problem"]), []

    def progress(row: Any) -> None:
        curve.append([time.process_time() - begin, row.iteration_time_s, row.lower_bound_s])

    options = {"time_limit_s": task["seconds"], "seed": task["seed"], "workers": task["workers"]}
    options |= {"progress": progress, "deterministic": task["clock"] == "work"}
    options |= _without(solve, task["without"])
    if task["problem"].get("rules") and not hasattr(problem.job, "rules"):
        options["constrain"] = _constraints(problem, task["problem"]["rules"])
    begin, wall = time.process_time(), WALL_S()
    try:
        result, error = solve(problem, **options), None
    except PipeplanError as found:
        result, error = None, f"{type(found).__name__}: {found}"[:300]
    row = {"cpu_s": time.process_time() - begin, "wall_s": WALL_S() - wall, "curve": curve}
    if result is None:
        return {**row, "error": error}
    return row | _figures(result, task)


def _figures(result: Any, task: dict[str, Any]) -> dict[str, Any]:
    from planner import verify

    plan = result.plan
    plan.save(task["plan"])
    broken = _broken(plan, task["problem"])
    return _proof(plan) | {
        "time_s": result.iteration_time_s,
        "bound_s": result.lower_bound_s,
        "status": result.status,
        "ended": result.ended,
        "tried": result.tried,
        "stages": [len(stage.devices) for stage in plan.stages],
        "problems": [*list(verify(plan))[:3], *broken],
    }


def _proof(plan: Any) -> dict[str, Any]:
    """Return whether the certificate of the bound is accepted; nothing if only the command knows.

    `pipeplan verify --prove` says the same, in a process more.
    """
    try:
        from planner.verification.proof import prove
    except ImportError:
        return {}
    return {"is_proved": not prove(plan).problems}


def _without(solve: Any, parts: list[str]) -> dict[str, Any]:
    """Return the argument that leaves parts of the search out.

    Raises:
        ValueError: if this build's search has none.
    """
    known = inspect.signature(solve).parameters
    for name in ("without", "without_steps"):
        if parts and name in known:
            return {name: tuple(parts)}
    if parts:
        raise ValueError("--without: solve() of this build takes neither without= nor steps")
    return {}


def _scheduled(task: dict[str, Any]) -> dict[str, Any]:
    """Return the best schedule of given stages."""
    from planner import search_schedule

    problem = problem_of(task["problem"])
    names = ("layers", "devices", "recompute", "offload")
    rows = [(*row, (), ()) for row in task["problem"]["stages"]]
    stages = [SimpleNamespace(**dict(zip(names, map(tuple, row), strict=True))) for row in rows]
    options = {"time_limit_s": task["seconds"], "seed": task["seed"], "workers": task["workers"]}
    options |= _without(search_schedule, task["without"])
    begin, wall = time.process_time(), WALL_S()
    found = search_schedule(problem, stages, split=task["problem"]["split"], **options)
    return {
        "cpu_s": time.process_time() - begin,
        "wall_s": WALL_S() - wall,
        "curve": [],
        "time_s": found.iteration_time_s,
        "bound_s": found.lower_bound_s,
        "problems": [],
    }


def _checked(task: dict[str, Any]) -> dict[str, Any]:
    """Return what this build's simulator and verifier say of a plan that any build saved."""
    from planner import Plan, simulate, verify

    data = json.loads(Path(task["plan"]).read_text())
    plan = Plan.parse({**data, "job": _known_job(data["job"])}, "plan")
    return {"judged_s": simulate(plan).iteration_time_s, "problems": list(verify(plan))[:3]}


def _prices(cluster: Any) -> dict[str, int]:
    """Return the price of each device an hour, in hundredths."""
    return {row.name: round(100 * (row.price_per_hour or 0)) for row in cluster.devices}


def _is_at(device: str, wanted: list[str]) -> bool:
    """Return whether a device, or its node, is one of those that a rule names."""
    return device in wanted or device.split("/")[0] in wanted


def _constraints(problem: Any, rules: dict[str, Any]) -> Any:
    """Return the rules of a job as constraints on the decisions of the partition model."""
    devices, price = problem.cluster.device_names, _prices(problem.cluster)

    def constrain(decisions: Any) -> None:
        model, stages = decisions.model, range(len(decisions.active))
        if "most_price_per_hour" in rules:
            total = sum(price[name] * decisions.is_used(name) for name in devices)
            model.add(total <= round(100 * rules["most_price_per_hour"]))
        if "most_nodes" in rules:
            nodes = {name.split("/")[0] for name in devices}
            used = {name: model.new_bool_var(name) for name in sorted(nodes)}
            for name in devices:
                model.add(decisions.is_used(name) <= used[name.split("/")[0]])
            model.add(sum(used.values()) <= rules["most_nodes"])
        for layer, wanted in rules.get("place", {}).items():
            for name in devices:
                if not _is_at(name, wanted):
                    model.add(decisions.runs_on(layer, name) == 0)
        for stage, (one, other) in product(stages, rules.get("apart", ())):
            model.add(decisions.uses(stage, one) + decisions.uses(stage, other) <= 1)
        for layers in rules.get("together", ()):
            for one, other in pairwise(layers):
                model.add(decisions.same_stage(one, other) == 1)

    return constrain


def _broken(plan: Any, data: dict[str, Any]) -> list[str]:
    """Return the rules that a plan breaks, read from its stages alone."""
    rules, stages = data.get("rules") or {}, plan.stages
    if not rules:
        return []
    used = {name for stage in stages for name in stage.devices}
    nodes = {name.split("/")[0] for name in used}
    price = _prices(plan.cluster)
    on = {layer: stage.devices for stage in stages for layer in stage.layers}
    kept = {
        "most_nodes": len(nodes) <= rules.get("most_nodes", len(nodes)),
        "most_price_per_hour": sum(price[name] for name in used)
        <= 100 * rules.get("most_price_per_hour", float("inf")),
        "place": all(
            _is_at(name, wanted)
            for layer, wanted in rules.get("place", {}).items()
            for name in on[layer]
        ),
        "apart": not any(
            set(pair) <= set(stage.devices) for pair in rules.get("apart", ()) for stage in stages
        ),
        "together": all(
            any(set(layers) <= set(stage.layers) for stage in stages)
            for layers in rules.get("together", ())
        ),
    }
    return [f"the rule {name} is broken" for name, is_kept in kept.items() if not is_kept]


if __name__ == "__main__":
    main()
