"""``pipeplan plan``: a search for a plan, or for a schedule of a plan's own stages."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
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
from planner.cli.output import keep_inputs, print_json, say, show, show_plan, user_errors
from planner.cli.problems import LoadedProblem, ProblemFiles, given_rules, is_graph_file
from planner.cli.sync import needs_pipelines, require_sync, with_sync
from planner.errors import PipeplanError
from planner.search.settings import DEFAULT_WORKERS, Preference
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.plan.plan import Plan
    from planner.plan.problem import Problem
    from planner.plan.runtime_rules import RuntimeRules
    from planner.search.orders.search import Schedule
    from planner.search.result import HistoryRow, Result, StepRow

DEFAULT_OUTPUT = Path("plan.json")
SEEN = 1.01
"""A bound is shown if it is higher than the one shown last by this factor."""
LITTLE = 0.06
"""Share of a device's memory; a plan that leaves less of it free is warned of."""


def plan(
    model: ModelArgument,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            help="cluster file (TOML); without one MODEL is a plan.json, whose stages are kept and "
            "whose operations are ordered again, as --runtime runs them",
        ),
    ] = None,
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="plan file to write (default: plan.json)")
    ] = None,
    time_limit: TimeLimitOption = 30.0,
    deterministic: DeterministicOption = False,
    prefer: Annotated[
        Literal["fast", "simple", "robust"],
        typer.Option(
            metavar="fast|simple|robust",
            help="of the plans about as fast as the fastest found: simple: one that is node-"
            "aligned, has fewest stages, then uneven replicas, and a published schedule (1 % "
            "slower at most); robust: one that keeps its time under noise (2 %)",
        ),
    ] = "fast",
    warm_start: Annotated[
        list[Path] | None,
        typer.Option(
            "--warm-start",
            metavar="PLAN",
            help="also start from the stages of this plan; may be repeated",
        ),
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(
            "--sync",
            metavar="NAME[:OPTION=VALUE,…]",
            help="how replicas agree, all_reduce unless given; choose: what suits the plan's "
            "pipelines, by simulation; one between pipelines makes a plan of pipelines",
        ),
    ] = None,
    runtime: RuntimeOption = None,
    memory_margin: MemoryMarginOption = None,
    workers: WorkersOption = DEFAULT_WORKERS,
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan and prove a lower bound on the iteration time."""
    limits = {"time_limit_s": time_limit, "workers": workers, "deterministic": deterministic}
    with user_errors(as_json):
        from planner.records.document import require_file_path
        from planner.search.settings import check_settings

        check_settings(time_limit, 0.0, 0, workers)
        path = output or DEFAULT_OUTPUT
        require_file_path(path)
        if output is None:
            _keep_default(path, warm_start or [])
        if cluster is None:
            if not is_graph_file(model) or any((job, set_, costs, warm_start, sync, memory_margin)):
                raise PipeplanError(
                    "--cluster: is missing; name a cluster file, or a plan.json and no option of a "
                    "problem but --runtime to order its operations again"
                )
            _reschedule(Path(model), path, limits, given_rules(runtime), as_json=as_json)
            return
        files = ProblemFiles(model, cluster, job, set_ or (), costs or (), runtime, memory_margin)
        _require_possible(files, path, sync, prefer)
        _search(
            files, path, limits, prefer, warm_start or [], sync, check=not no_check, as_json=as_json
        )


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


def _require_possible(files: ProblemFiles, output: Path, sync: str | None, prefer: str) -> None:
    """Refuse wrong settings before the model is traced, which may take long."""
    require_sync(sync)
    rules = given_rules(files.runtime)
    if needs_pipelines(sync):
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
    keep_inputs(output, files.inputs)


def _search(
    files: ProblemFiles,
    output: Path,
    limits: dict[str, Any],
    prefer: str,
    warm_paths: Sequence[Path],
    sync: str | None,
    *,
    check: bool,
    as_json: bool,
) -> None:
    """Search for a plan, write it and show it."""
    from planner.prediction import load_plan
    from planner.verification import save_valid

    warm_starts = [load_plan(path) for path in warm_paths]
    loaded = files.load(check=check)
    _print_unusable(loaded.problem, dict(zip(warm_paths, warm_starts, strict=True)))
    limits = {**limits, "progress": progress_table(quiet=as_json), "warm_starts": warm_starts}
    found = _solved(loaded.problem, limits, prefer, has_pipelines=needs_pipelines(sync))
    made, reason = with_sync(found.plan, sync)
    save_valid(made, output)
    if prefer != "fast" and found.robustness is None and found.simplicity is None:
        say("note: interrupted before plans near the fastest were compared", err=True)
    found = replace(found, plan=made)
    if logging.getLogger("planner").isEnabledFor(logging.INFO):
        for line in step_lines(found.steps):
            say(line, err=True)
    if as_json:
        print_json(_data(found, output))
    else:
        _show(found, loaded, output, has_margin=files.memory_margin is not None)
        if reason:
            say(f"synchronisation strategy: {reason}")
        say_if(found.shortcoming())
    if loaded.compared is not None:
        say(loaded.compared, err=True)


def _solved(
    problem: Problem, limits: dict[str, Any], prefer: str, *, has_pipelines: bool
) -> Result:
    from planner.search.data_parallel import solve_data_parallel
    from planner.search.solve import solve

    if has_pipelines:
        return solve_data_parallel(problem, **limits)
    kind: Preference = "simple" if prefer == "simple" else "fast"
    return solve(problem, **limits, robust=prefer == "robust", prefer=kind)


def _print_unusable(problem: Problem, plans: dict[Path, Plan]) -> None:
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


def _show(result: Result, loaded: LoadedProblem, output: Path, *, has_margin: bool) -> None:
    """Print a result whose plan was written."""
    from planner.report.summary import runtime_lines, space_lines

    plan = result.plan
    _print_unjoined(plan)
    show_plan(plan)
    lines = [result.summary(), *space_lines(plan), *runtime_lines(plan.runtime)]
    # Who leaves memory free on purpose fills the rest on purpose.
    lines += [] if has_margin else memory_lines(plan)
    show(*lines, *_about_gap(result), f"wrote {output}")
    print_run_command(plan, output, loaded.text_problem)


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
    from planner.report.summary import throughput_data
    from planner.search.result import unjoined_devices

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
    from planner.plan.operations import compress_devices
    from planner.search.result import unjoined_devices

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


def say_if(text: str | None) -> None:
    """Print a line, if there is one."""
    if text is not None:
        say(text)


def progress_table(quiet: bool) -> Callable[[HistoryRow], None]:
    """Return a function that prints rows of progress below a heading."""
    if quiet:
        return lambda row: None
    headings = [f"{'time':>8}  {'iteration':>12}  {'bound':>12}  {'gap':>7}"]
    shown_s = bound_s = math.inf

    def show_row(row: HistoryRow) -> None:
        nonlocal shown_s, bound_s
        if row.iteration_time_s == shown_s and row.lower_bound_s < SEEN * bound_s:
            return
        shown_s, bound_s = row.iteration_time_s, row.lower_bound_s
        while headings:
            say(headings.pop(), err=True)
        gap = f"{row.gap:7.2%}" if row.gap is not None else "      -"
        time, bound = format_seconds(row.iteration_time_s), format_seconds(row.lower_bound_s)
        say(f"{row.time_s:7.1f}s  {time:>12}  {bound:>12}  {gap}  {row.event}", err=True)

    return show_row


def step_lines(steps: Sequence[StepRow]) -> list[str]:
    """Return a table of what each step of a search took and brought."""
    lines = [f"{'step':<24}  {'took':>8}  {'layouts':>9}  {'iteration':>12}  {'bound':>12}"]
    for row in steps:
        time, bound = format_seconds(row.iteration_time_s), format_seconds(row.lower_bound_s)
        time = time if math.isfinite(row.iteration_time_s) else "-"
        lines.append(
            f"{row.name:<24}  {row.seconds:7.1f}s  {row.layouts:>9,}  {time:>12}  {bound:>12}"
        )
    return lines


# --- the schedule of a plan's own stages ----------------------------------------------------------


def _reschedule(
    model: Path, output: Path, limits: dict[str, Any], rules: RuntimeRules | None, *, as_json: bool
) -> None:
    """Order the operations of a plan's stages again, perhaps for another runtime; show the plan."""
    from planner.prediction import load_plan
    from planner.search.orders.search import search_schedule
    from planner.verification import save_valid

    loaded = load_plan(model)
    if rules is not None:
        loaded = loaded.model_copy(update={"runtime": rules})
    found = search_schedule(loaded.problem, loaded.stages, split=loaded.job.splits, **limits)
    kept = _no_slower(loaded, found)
    made = _with_orders(loaded, found) if kept is None else kept
    save_valid(made, output)
    time_s, bound_s = made.predicted.iteration_time_s, found.lower_bound_s
    if as_json:
        data = {"plan": str(output), "method": "as before" if kept else found.method}
        print_json({**data, "iteration_time_s": time_s, "schedule_lower_bound_s": bound_s})
        return
    show_plan(made)
    found_s, old_s = found.iteration_time_s, loaded.predicted.iteration_time_s
    before = f"the old orders take {format_seconds(old_s)}"
    before = f"as run by {rules.name}" if rules else before
    gap = f", gap {max(0.0, time_s / bound_s - 1):.2%}" if bound_s > 0 else ""
    show(
        f"iteration time {format_seconds(found_s)} with {found.method}; {before}"
        if kept is None
        else f"the old orders stay: they take {format_seconds(time_s)}, and nothing faster was "
        f"found ({format_seconds(found_s)} with {found.method})",
        f"lower bound for every schedule of these stages {format_seconds(bound_s)}{gap}",
        f"wrote {output}",
    )


def _no_slower(plan: Plan, found: Schedule) -> Plan | None:
    """Return the plan with new predictions if its own orders are valid and no slower."""
    from planner.prediction import refresh
    from planner.verification import verify

    try:
        again = refresh(plan)
    except PipeplanError:
        return None
    is_slower = again.predicted.iteration_time_s > found.iteration_time_s
    # Orders that take more memory than there is may well be faster.
    return None if is_slower or verify(again) else again


def _with_orders(plan: Plan, found: Schedule) -> Plan:
    """Return the plan with the schedule's orders and new predictions.

    Its job allows the kinds of backward that the orders have.
    """
    from planner.plan.operations import format_order
    from planner.prediction import refresh
    from planner.space import widened

    kinds = {operation.kind for order in found.orders.values() for operation in order} - {"F"}
    job = plan.job.model_copy(update={"backward": widened(plan.job.backward, kinds)})
    orders = {device: format_order(list(order)) for device, order in found.orders.items()}
    return refresh(plan.model_copy(update={"orders": orders, "job": job}))
