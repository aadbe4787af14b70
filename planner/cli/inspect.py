"""The commands that measure, show or check something: trace, detect, profile, verify, plot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.models import is_graph_file, job_of, traced
from planner.cli.options import (
    JobOption,
    JsonOption,
    ModelArgument,
    NoCheckOption,
    PlanArgument,
    RunByOption,
    SetOption,
)
from planner.cli.output import named, print_json, print_written, say, show, user_errors
from planner.errors import PipeplanError, shorten

if TYPE_CHECKING:
    from planner.job import Job
    from planner.plan.plan import Plan
    from planner.simulation.timeline import Timeline


def trace(
    model: ModelArgument,
    job: JobOption = None,
    set_: SetOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the layer graph as JSON")
    ] = None,
    split: Annotated[
        list[int] | None,
        typer.Option(
            "--split",
            metavar="DEGREE",
            min=2,
            max=4096,
            help="show instead how each layer splits over a tensor-parallel group of so many, and "
            "keep it in the layer graph that is written; may be repeated",
        ),
    ] = None,
    sequence: Annotated[
        bool,
        typer.Option("--sequence", help="with --split: share positions between its regions"),
    ] = False,
    experts: Annotated[
        bool,
        typer.Option("--experts", help="with --split: give devices whole experts, not shares"),
    ] = False,
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Trace a model and show each layer's FLOPs, parameters, stash and boundary tensors."""
    with user_errors(as_json):
        if split:
            _show_splits(model, job_of(job, set_), split, sequence, experts, output, as_json)
            return
        if sequence or experts:
            name = "--sequence" if sequence else "--experts"
            raise PipeplanError(f"{name} is part of a split; add --split DEGREE")
        graph, _, compared = traced(model, job_of(job, set_), check=not no_check)
        if output is not None:
            graph.save(output)
        if compared is not None:
            say(compared, err=True)
        if as_json:
            print_json(graph.record.model_dump(mode="json"))
            return
        from planner.report.layers import layer_table

        show(layer_table(graph))
        if output is not None:
            say(f"wrote {output}", err=True)


def _show_splits(
    model: str,
    job: Job,
    degrees: Sequence[int],
    sequence: bool,
    experts: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    if is_graph_file(model):
        raise PipeplanError(f"{model}: a layer graph has no operations to split; name the model")
    from planner.model.layer_graph import LayerGraph
    from planner.report.layers import split_table, unsplit_lines
    from planner.tracing.sharding.record import with_splits
    from planner.tracing.sharding.routing import ExpertRouting, routing_of
    from planner.tracing.trace import trace_step

    routing = routing_of(job) or (ExpertRouting() if experts else None)
    step = trace_step(model, job)
    record = with_splits(step, dict.fromkeys(degrees), sequence=sequence, experts=routing)
    if output is not None:
        LayerGraph.from_record(record).save(output)
    if as_json:
        splits = [split.model_dump(mode="json") for split in record.splits]
        print_json(splits if len(splits) > 1 else splits[0])
        return
    for split in record.splits:
        show(split_table(record, split), *unsplit_lines(split))
    if output is not None:
        say(f"wrote {output}", err=True)


def profile(context: typer.Context) -> None:
    """Measure the time and memory of each layer of a model on this device (--help: all options)."""
    # The executor needs nothing of the planner's command line, and GPU machines may not have it.
    command = [sys.executable, "-m", "executor.profiling", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def detect(context: typer.Context) -> None:
    """Write a cluster file of this machine (--help: all options), or list --presets of hardware."""
    if context.args == ["--presets"]:
        from planner.report.presets import preset_tables

        show(*preset_tables())
        return
    command = [sys.executable, "-m", "executor.detect", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def verify(
    path: PlanArgument,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="also check the certificate of the lower bound, say what it proves, and refuse "
            "the plan if it proves nothing",
        ),
    ] = False,
    runtime: RunByOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a plan is valid; print the reasons and exit with status 1 if not."""
    with user_errors(as_json):
        from planner.prediction import load_plan
        from planner.verification import require_valid
        from planner.verification.proof import prove as check_proof

        problems: list[str] = []
        plan = proof = None
        try:
            plan = load_plan(path, runtime)
            require_valid(plan, str(path))
            proof = check_proof(plan) if prove else None
        except PipeplanError as error:
            problems = list(error.problems)
        if proof is not None:
            problems += (f"{path}: {problem}" for problem in proof.problems)
        if as_json:
            data = {"plan": str(path), "valid": not problems, "problems": problems}
            print_json(data if proof is None else {**data, "proof": proof.data()})
        elif problems or plan is None:
            raise PipeplanError(problems)
        else:
            for line in (f"holds; {_about_bound(plan)}", *(proof.lines() if proof else ())):
                say(f"{path}: {line}")
        if problems:
            raise typer.Exit(1)


def _about_bound(plan: Plan) -> str:
    """Return whether a valid plan lies in the space of its bound, and which one that is."""
    covers = plan.provenance.bound_covers
    if covers.space is None:
        return f"its bound covers {covers}"
    return f"it lies in the space of its bound: {covers.space}"


def plot(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PLAN...", help="plan files; several are drawn on one time scale"),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="picture to write: .png or .svg")
    ] = Path("plan.png"),
    memory: Annotated[bool, typer.Option("--memory", help="draw memory over time instead")] = False,
    as_json: JsonOption = False,
) -> None:
    """Draw Gantt charts of plans on one time scale, or one plan's memory over time."""
    with user_errors(as_json):
        from planner.prediction import load_plan, replay
        from planner.report.gantt import save_gantts
        from planner.report.memory_plot import save_memory

        if memory and len(paths) > 1:
            raise PipeplanError("--memory accepts exactly one plan")
        plans = [load_plan(path) for path in paths]
        if memory:
            with named(paths[0]):
                save_memory(replay(plans[0]), output)
        else:
            save_gantts(_charts(paths, plans), output)
        print_written(paths, output, as_json=as_json)


def _charts(paths: Sequence[Path], plans: Sequence[Plan]) -> list[tuple[str, Timeline]]:
    """Titles and timelines; the file tells apart plans of one model on one cluster."""
    from planner.prediction import replay

    titles = [f"{plan.model.name} on {plan.cluster.name}" for plan in plans]
    if len(plans) > 1:
        titles = [f"{path}: {title}" for path, title in zip(paths, titles, strict=True)]
    charts = []
    for path, title, plan in zip(paths, titles, plans, strict=True):
        with named(path):
            charts.append((title, replay(plan)))
    return charts


KINDS = (
    *("plan", "graph", "cluster", "job", "runtime", "train"),
    *("costs", "sweep", "sync-trace", "moves"),
)


def schema(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help=", ".join(KINDS)),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write (default: print it)")
    ] = None,
) -> None:
    """Print the JSON Schema of a kind of file (fields, types, ranges, units, meanings)."""
    with user_errors():
        from planner.records.document import write_atomically

        if kind not in KINDS:
            raise PipeplanError(f"KIND: no schema of {shorten(kind)}; there are {', '.join(KINDS)}")
        text = _text(kind)
        if output is None:
            typer.echo(text, nl=False)
        else:
            write_atomically(output, text)
            say(f"wrote {output}")


def _text(kind: str) -> str:
    from planner.schemas import ARTIFACTS, schema_text

    if kind in ARTIFACTS:
        return schema_text(ARTIFACTS[kind])
    # A training file is the executor's, which the planner does not import.
    command = [sys.executable, "-m", "executor.launch.train_schema"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
