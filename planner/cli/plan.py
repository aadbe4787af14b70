"""``pipeplan plan``: a search for a plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from planner.cli.options import (
    CostsOption,
    DeterministicOption,
    JobOption,
    JsonOption,
    MemoryMarginOption,
    ModelArgument,
    NoCheckOption,
    RuntimeOption,
    SetOption,
    TimeLimitOption,
    WorkersOption,
)
from planner.cli.output import print_json, require_outputs, say, show, show_plan, user_errors
from planner.cli.problems import LoadedProblem, ProblemFiles, given_rules, is_graph_file
from planner.cli.reorder import reorder
from planner.cli.sync import needs_pipelines, require_sync, with_sync
from planner.errors import PipeplanError
from planner.search.settings import DEFAULT_WORKERS, Preference
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.plan.plan import Plan
    from planner.plan.problem import Problem
    from planner.search.result import HistoryRow, Result, StepRow

DEFAULT_OUTPUT = Path("plan.json")
SEEN = 1.01
"""A bound is shown if it is higher than the one shown last by this factor."""
LITTLE = 0.06
"""Share of a device's memory; a plan that leaves less of it free is warned of."""


ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        help="cluster file (TOML); without one MODEL is a plan.json, whose stages are kept and "
        "whose operations are ordered again, as --runtime runs them",
    ),
]
PreferOption = Annotated[
    Literal["fast", "simple", "robust"],
    typer.Option(
        "--prefer",
        metavar="fast|simple|robust",
        help="of the plans about as fast as the fastest found: simple: one that is node-"
        "aligned, has fewest stages, then uneven replicas, and a published schedule (1 % "
        "slower at most); robust: one that keeps its time under noise (2 %)",
    ),
]
WarmStartOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--warm-start",
        metavar="PLAN",
        help="also start from the stages of this plan; may be repeated",
    ),
]
SyncOption = Annotated[
    str | None,
    typer.Option(
        "--sync",
        metavar="NAME[:OPTION=VALUE,…]",
        help="how replicas agree, all_reduce unless given; choose: what suits the plan's "
        "pipelines, by simulation; one between pipelines makes a plan of pipelines",
    ),
]


def plan(
    model: ModelArgument,
    cluster: ClusterOption = None,
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="plan file to write (default: plan.json)")
    ] = None,
    time_limit: TimeLimitOption = 30.0,
    deterministic: DeterministicOption = False,
    prefer: PreferOption = "fast",
    warm_start: WarmStartOption = None,
    sync: SyncOption = None,
    runtime: RuntimeOption = None,
    memory_margin: MemoryMarginOption = None,
    workers: WorkersOption = DEFAULT_WORKERS,
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan and prove a lower bound on the iteration time."""
    limits: dict[str, Any] = {
        "time_limit_s": time_limit,
        "workers": workers,
        "deterministic": deterministic,
    }
    with user_errors(as_json):
        from planner.prediction import load_plan
        from planner.search.settings import check_settings
        from planner.verification import save_valid

        check_settings(time_limit, 0.0, 0, workers)
        path, warm = output or DEFAULT_OUTPUT, warm_start or []
        require_outputs({"--output": path})
        if output is None:
            _keep_default(path, warm)
        if cluster is None:
            if not is_graph_file(model) or any((job, set_, costs, warm, sync, memory_margin)):
                raise PipeplanError(
                    "--cluster: is missing; name a cluster file, or a plan.json and no option of a "
                    "problem but --runtime to order its operations again"
                )
            reorder(Path(model), path, limits, given_rules(runtime), as_json=as_json)
            return
        files = ProblemFiles(model, cluster, job, set_ or (), costs or (), runtime, memory_margin)
        _require_possible(files, sync, prefer)
        require_outputs({"--output": path}, files.inputs)
        # Plans are quick to read, and the model may take long to trace.
        plans = {start: load_plan(start) for start in warm}
        loaded = files.load(check=not no_check)
        _print_unusable(loaded.problem, plans)
        rows = ProgressTable(quiet=as_json)
        limits |= {"progress": rows.add, "warm_starts": list(plans.values())}
        found = _solved(loaded.problem, limits, prefer, has_pipelines=needs_pipelines(sync))
        rows.end()
        made, reason = with_sync(found.plan, sync)
        save_valid(made, path)
        if prefer != "fast" and found.robustness is None and found.simplicity is None:
            say("note: interrupted before plans near the fastest were compared", err=True)
        _show(replace(found, plan=made), loaded, files, path, reason, as_json=as_json)


def _keep_default(path: Path, warm_starts: Sequence[Path]) -> None:
    """Refuse to write over a file that was not named with ``-o``, before any search."""
    if not path.exists():
        return
    for start in warm_starts:
        if start.exists() and start.samefile(path):
            raise PipeplanError(
                f"--warm-start {start}: would be overwritten; give -o {start} explicitly if you "
                "want that, or choose another name"
            )
    raise PipeplanError(f"{path}: exists already; name the file to write with -o")


def _require_possible(files: ProblemFiles, sync: str | None, prefer: str) -> None:
    """Refuse wrong settings before the model is traced, which may take long."""
    require_sync(sync)
    rules = given_rules(files.runtime)
    if not needs_pipelines(sync):
        return
    if rules is not None and rules.expresses != "pipeplan":
        raise PipeplanError(
            f"--sync {sync}: {rules.name} reduces gradients over all pipelines in every "
            "iteration; leave --sync out, or plan for pipeplan"
        )
    if prefer != "fast":
        raise PipeplanError(
            f"--prefer {prefer}: compares plans under a synchronous strategy, and {sync} is "
            f"not one; remove --prefer {prefer}"
        )


def _solved(
    problem: Problem, limits: dict[str, Any], prefer: str, *, has_pipelines: bool
) -> Result:
    from planner.search.data_parallel import solve_data_parallel
    from planner.search.solve import solve

    if has_pipelines:
        return solve_data_parallel(problem, **limits)
    kind: Preference = "simple" if prefer == "simple" else "fast"
    return solve(problem, **limits, robust=prefer == "robust", prefer=kind)


def _print_unusable(problem: Problem, plans: Mapping[Path, Plan]) -> None:
    """Print which warm starts cannot be used."""
    from planner.search.finish import starts_of

    if problem.job.tensor_parallel != 1:
        return  # A plan may fit one size of groups and not another.
    for path, earlier in plans.items():
        if not any(starts_of(problem, [earlier])):
            say(
                f"note: {path} is ignored: its stages are not consecutive layers of this model, or "
                f"one of them has no device in this cluster",
                err=True,
            )


def _show(
    result: Result,
    loaded: LoadedProblem,
    files: ProblemFiles,
    output: Path,
    reason: str,
    *,
    as_json: bool,
) -> None:
    """Print a result whose plan was written; ``reason`` is that of its synchronisation."""
    from planner.report.summary import runtime_lines, space_lines

    if logging.getLogger("planner").isEnabledFor(logging.INFO):
        for line in _step_lines(result.steps):
            say(line, err=True)
    if as_json:
        print_json(_data(result, output))
    else:
        plan = result.plan
        _print_unjoined(plan)
        show_plan(plan)
        show(result.summary(), *space_lines(plan), *runtime_lines(plan.runtime))
        # Who leaves memory free on purpose fills the rest on purpose.
        show(*([] if files.memory_margin else memory_lines(plan)), *_about_gap(result))
        say(f"wrote {output}")
        print_run_command(plan, output, loaded.text_problem)
        if reason:
            say(f"synchronisation strategy: {reason}")
        if shortcoming := result.shortcoming():
            say(shortcoming)
    if loaded.compared is not None:
        say(loaded.compared, err=True)


def memory_lines(plan: Plan) -> list[str]:
    """Return a line on devices that the plan fills nearly; none where all have room."""
    cluster = plan.on_groups.cluster
    left = {
        name: 1 - row.peak_memory_bytes / cluster.device_type(name).capacity_bytes
        for name, row in plan.predicted.devices.items()
    }
    full = {name: share for name, share in left.items() if share < LITTLE}
    if not full:
        return []
    least = min(full, key=lambda name: full[name])
    return [
        f"warning: memory is nearly full: {plural(len(full), 'device')} with less than "
        f"{LITTLE:.0%} of it free, {least} with {full[least]:.1%}; fragmentation or another "
        "process may exceed it: plan again with --memory-margin 6%"
    ]


def _data(result: Result, output: Path) -> dict[str, Any]:
    """Return the JSON output."""
    from planner.analysis.hardware import unjoined_devices
    from planner.report.summary import throughput_data

    return {
        "status": result.status,
        "ended": result.ended,
        "shortcoming": result.shortcoming(),
        "plan": str(output),
        **result.plan.predicted.model_dump(mode="json"),
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "throughput": throughput_data(result.plan),
        "runtime": result.plan.job.runtime and result.plan.runtime.name,
        "bound_covers": result.plan.provenance.bound_covers.model_dump(mode="json"),
        "unjoined_devices": list(unjoined_devices(result.plan)),
        "microbatch_sizes": list(result.sizes),
        "robustness": result.robustness and asdict(result.robustness),
        "simplicity": result.simplicity and asdict(result.simplicity),
        "length_choice": result.lengths and asdict(result.lengths),
        "history": [row._asdict() for row in result.history],
        "steps": [row._asdict() for row in result.steps],
    }


def _print_unjoined(plan: Plan) -> None:
    """Print which devices the plan could not use because no route joins them."""
    from planner.analysis.hardware import unjoined_devices
    from planner.plan.operations import compress_devices

    if devices := unjoined_devices(plan):
        say(
            f"not used: {compress_devices(devices)}, {plural(len(devices), 'device')}, since no "
            "path of links joins them to the devices of the plan; add links to the cluster file"
        )


def _about_gap(result: Result) -> Iterator[str]:
    """Yield a sentence on what the gap includes, if there is something to say."""
    chosen = result.robustness or result.simplicity
    if chosen and result.iteration_time_s > result.history[-1].iteration_time_s:
        word = "robust" if result.robustness is not None else "simple"
        yield f"the gap refers to this plan's time; a faster but less {word} plan is known"
    elif needs_pipelines(result.plan.sync.strategy):
        yield ("time and bound assume synchronous pipelines, the bound of a single one included")
    elif result.status != "optimal" and result.gap is not None:
        yield "a better plan may exist within the gap; none is known"


def print_run_command(plan: Plan, output: Path, text_problem: str | None) -> None:
    """Print how to run a plan, and on what data, if its model is known."""
    from planner.plan.run_command import data_line, run_commands

    commands = run_commands(plan, output, text_problem)
    if commands is not None:
        show(*commands.lines("run it"), data_line(text_problem))


class ProgressTable:
    """Rows of a search's progress on stderr: each new plan, each notably higher bound, the last."""

    def __init__(self, *, quiet: bool) -> None:
        self._is_quiet = quiet
        self._shown: HistoryRow | None = None
        self._latest: HistoryRow | None = None

    def add(self, row: HistoryRow) -> None:
        """Take a row, and print it if it differs enough from the one printed last."""
        self._latest, last = row, self._shown
        is_faster = last is None or row.iteration_time_s != last.iteration_time_s
        if is_faster or (last and row.lower_bound_s >= SEEN * last.lower_bound_s):
            self._print(row)

    def end(self) -> None:
        """Print the last row, whose bound the summary states, if that was not done yet."""
        if self._latest is not None and self._latest is not self._shown:
            self._print(self._latest)

    def _print(self, row: HistoryRow) -> None:
        is_first, self._shown = self._shown is None, row
        if self._is_quiet:
            return
        if is_first:
            say(f"{'time':>8}  {'iteration':>12}  {'bound':>12}  {'gap':>7}", err=True)
        gap = f"{row.gap:7.2%}" if row.gap is not None else "      -"
        time, bound = format_seconds(row.iteration_time_s), format_seconds(row.lower_bound_s)
        say(f"{row.time_s:7.1f}s  {time:>12}  {bound:>12}  {gap}  {row.event}", err=True)


def _step_lines(steps: Sequence[StepRow]) -> list[str]:
    """Return a table of what each step of a search took and brought."""
    lines = [f"{'step':<24}  {'took':>8}  {'layouts':>9}  {'iteration':>12}  {'bound':>12}"]
    for row in steps:
        time, bound = format_seconds(row.iteration_time_s), format_seconds(row.lower_bound_s)
        time = time if math.isfinite(row.iteration_time_s) else "-"
        lines.append(
            f"{row.name:<24}  {row.seconds:7.1f}s  {row.layouts:>9,}  {time:>12}  {bound:>12}"
        )
    return lines
