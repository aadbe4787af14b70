"""The command line: ``pipeplan trace | plan | compare | verify | simulate | plot``.

Exit status: 0 done; 1 the input is wrong, the plan does not hold or none exists; 2 wrong usage.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.errors import PipeplanError
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.artifacts.job import Job
    from planner.artifacts.layer_graph import LayerGraph
    from planner.artifacts.plan import Plan
    from planner.artifacts.problem import Problem
    from planner.result import HistoryRow, Result

app = typer.Typer(
    help="The fastest way to run pipeline-parallel training on the machines you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="module:factory (its code is imported), or a graph.json of `trace`"
    ),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="plan file")]
JobOption = Annotated[Path | None, typer.Option("--job", help="job file (TOML)")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="a model argument, over the job's; may be repeated"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]


@contextmanager
def _user_errors() -> Iterator[None]:
    """Print what is wrong with the input, without a traceback."""
    try:
        yield
    except PipeplanError as error:
        for problem in error.problems:
            typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None


def _version(value: bool) -> None:
    if value:
        from planner.assemble import version

        typer.echo(f"pipeplan {version('pipeplan')}")
        raise typer.Exit


@app.callback()
def _main(
    verbose: Annotated[bool, typer.Option("--verbose", help="log what the solvers do")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")


def _job(path: Path | None, settings: list[str] | None) -> Job:
    from planner.artifacts.job import Job

    job = Job() if path is None else Job.load(path)
    if not settings:
        return job
    arguments = {**job.model_arguments, **dict(map(_setting, settings))}
    return job.model_copy(update={"model_arguments": arguments})


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise PipeplanError(f"--set {text}: expected NAME=VALUE, for example --set layers=12")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _graph(model: str, job: Job) -> LayerGraph:
    from planner.artifacts.layer_graph import LayerGraph

    if model.endswith(".json"):
        return LayerGraph.load(model)
    if ":" not in model:
        raise PipeplanError(
            f"MODEL {model!r}: expected module:factory, for example models.gpt:gpt2_small, "
            "or a graph.json written by `pipeplan trace`"
        )
    from planner.tracing.trace import trace

    return trace(model, job)


@app.command()
def trace(
    model: ModelArgument,
    job: JobOption = None,
    set_: SetOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the layer graph as JSON")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a model computes, keeps and hands on, layer by layer."""
    with _user_errors():
        graph = _graph(model, _job(job, set_))
        if output is not None:
            graph.save(output)
        if as_json:
            typer.echo(graph.record.model_dump_json())
            return
        from planner.report.layers import layer_table

        _print(layer_table(graph))
        if output is not None:
            typer.echo(f"wrote {output}", err=True)


@app.command()
def plan(
    model: ModelArgument,
    cluster: Annotated[Path, typer.Option("--cluster", help="cluster file (TOML)")],
    job: JobOption = None,
    set_: SetOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="plan file")] = Path("plan.json"),
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="stop after this long")
    ] = 30.0,
    gap: Annotated[
        float, typer.Option("--gap", help="stop once time / bound - 1 is this small")
    ] = 1e-4,
    seed: Annotated[int, typer.Option("--seed", help="of the solver")] = 0,
    workers: Annotated[int, typer.Option("--workers", help="solver threads")] = 2,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="the same plan on every run and machine")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan and prove how far from the best it can be."""
    with _user_errors():
        from planner.artifacts.document import require_file_path
        from planner.solver import check_settings, solve

        # What can be wrong is found before the model is traced, which may take a while.
        check_settings(time_limit, gap, seed, workers)
        require_file_path(output)
        result = solve(
            _problem(model, cluster, job, set_),
            time_limit_s=time_limit,
            gap_limit=gap,
            seed=seed,
            workers=workers,
            deterministic=deterministic,
            progress=_progress_table(quiet=as_json),
        )
        result.plan.save(output)
        _report_result(result, output, as_json)


def _problem(model: str, cluster: Path, job: Path | None, set_: list[str] | None) -> Problem:
    from planner.artifacts.cluster import Cluster
    from planner.artifacts.problem import ModelSource, Problem

    the_job = _job(job, set_)
    the_cluster = Cluster.load(cluster)
    factory = None if model.endswith(".json") else model
    if factory is None and set_:
        raise PipeplanError(
            f"--set {set_[0]}: {model} was traced already; trace the model again with it"
        )
    source = ModelSource(factory, dict(the_job.model_arguments))
    return Problem(_graph(model, the_job), the_cluster, the_job, source)


@app.command()
def compare(
    model: ModelArgument,
    cluster: Annotated[Path, typer.Option("--cluster", help="cluster file (TOML)")],
    job: JobOption = None,
    set_: SetOption = None,
    planners: Annotated[
        str | None,
        typer.Option("--planners", metavar="NAME,…", help="classic planners; default all"),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="of our own search")
    ] = 30.0,
    seed: Annotated[int, typer.Option("--seed", help="of the solver")] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the table as Markdown")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure our plan against the classic planners', all in one simulator."""
    with _user_errors():
        from planner.compare_command import check_comparison, run_comparison

        check_comparison(planners, time_limit, output)
        found = run_comparison(
            _problem(model, cluster, job, set_),
            planners,
            time_limit_s=time_limit,
            seed=seed,
            output=output,
            as_json=as_json,
        )
        if not found:
            raise typer.Exit(1)


def _report_result(result: Result, output: Path, as_json: bool) -> None:
    if as_json:
        _print_json(
            {
                "status": result.status,
                "plan": str(output),
                **result.plan.predicted.model_dump(mode="json"),
                "history": [row._asdict() for row in result.history],
            }
        )
        return
    _show(result.plan)
    typer.echo(result.summary())
    typer.echo(f"the bound holds for {result.plan.provenance.bound_covers}")
    if result.status != "optimal" and result.gap is not None:
        typer.echo("the gap is what is not proved: a better plan may exist, none is known")
    typer.echo(f"wrote {output}")


def _progress_table(quiet: bool) -> Callable[[HistoryRow], None]:
    """Prints rows of progress as they come, below a heading."""
    if quiet:
        return lambda row: None
    headings = [f"{'time':>8}  {'iteration':>12}  {'bound':>12}  {'gap':>7}"]

    def show(row: HistoryRow) -> None:
        while headings:
            typer.echo(headings.pop(), err=True)
        gap = f"{row.gap:7.2%}" if row.gap is not None else "      -"
        time, bound = format_seconds(row.iteration_time_s), format_seconds(row.lower_bound_s)
        typer.echo(f"{row.time_s:7.1f}s  {time:>12}  {bound:>12}  {gap}  {row.event}", err=True)

    return show


@app.command()
def verify(path: PlanArgument, as_json: JsonOption = False) -> None:
    """Check that a plan holds; exit status 1 and the reasons if it does not."""
    with _user_errors():
        from planner.artifacts.plan import Plan
        from planner.verifier import verify as find_problems

        try:
            problems = find_problems(Plan.load(path))
        except PipeplanError as error:
            problems = list(error.problems)
        if as_json:
            _print_json({"plan": str(path), "valid": not problems, "problems": problems})
        elif problems:
            raise PipeplanError(problems)
        else:
            typer.echo(f"{path}: holds")
        if problems:
            raise typer.Exit(1)


@app.command()
def simulate(
    path: PlanArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="write the plan with fresh predictions here"),
    ] = None,
    trace_path: Annotated[
        Path | None, typer.Option("--trace", help="write a Chrome trace (opens in Perfetto)")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a plan and show what every device does."""
    with _user_errors():
        from planner.artifacts.plan import Plan
        from planner.assemble import refresh
        from planner.report.chrome_trace import save_chrome_trace
        from planner.simulator import simulate_plan

        loaded = Plan.load(path)
        the_plan = refresh(loaded)
        if output is not None:
            the_plan.save(output)
        if trace_path is not None:
            save_chrome_trace(simulate_plan(the_plan), trace_path)
        if as_json:
            _print_json(the_plan.predicted.model_dump(mode="json"))
            return
        _show(the_plan)
        if the_plan.provenance != loaded.provenance:
            typer.echo(f"bound covers {the_plan.provenance.bound_covers}")
        for written in (output, trace_path):
            if written is not None:
                typer.echo(f"wrote {written}")


@app.command()
def plot(
    path: PlanArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="picture to write: .png or .svg")
    ] = Path("plan.png"),
    memory: Annotated[bool, typer.Option("--memory", help="memory over time instead")] = False,
) -> None:
    """Draw a plan as a Gantt chart, or its memory over time."""
    with _user_errors():
        from planner.artifacts.plan import Plan
        from planner.report.gantt import save_gantt
        from planner.report.memory_plot import save_memory
        from planner.verifier import replay

        the_plan = Plan.load(path)
        timeline = replay(the_plan)
        if memory:
            save_memory(timeline, output)
        else:
            save_gantt(timeline, output, title=f"{the_plan.model.name} on {the_plan.cluster.name}")
        typer.echo(f"wrote {output}")


def _show(the_plan: Plan) -> None:
    from planner.report.summary import plan_tables
    from planner.simulator import simulate_plan

    _print(plan_tables(the_plan, simulate_plan(the_plan)))


def _print(renderable: Any) -> None:
    from rich.console import Console

    # Piped output is for reading too: do not fold tables at 80 columns.
    Console(width=None if sys.stdout.isatty() else 120).print(renderable)


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=1))


def main() -> None:
    """Entry point of the command ``pipeplan``."""
    app()


if __name__ == "__main__":
    main()
