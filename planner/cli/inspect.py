"""The commands that measure or check something: trace, detect, profile, verify."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import (
    JobOption,
    JsonOption,
    ModelArgument,
    NoCheckOption,
    PlanArgument,
    RunByOption,
    SetOption,
)
from planner.cli.output import named, print_json, require_outputs, say, show, user_errors
from planner.cli.problems import is_graph_file, job_of, traced
from planner.errors import PipeplanError, shorten

if TYPE_CHECKING:
    from planner.job import Job
    from planner.plan.plan import Plan


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
    from planner.tracing.sharding.record import routing_of, with_splits
    from planner.tracing.trace import trace_step

    routing = routing_of(job)
    if routing is None and experts:
        routing = ()
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


def detect(context: typer.Context) -> None:
    """Write a cluster file of this machine (--help: all options), or list --presets of hardware."""
    if context.args == ["--presets"]:
        from planner.report.presets import preset_tables

        show(*preset_tables())
        return
    _run("executor.detect", context.args)


def profile(context: typer.Context) -> None:
    """Measure each layer on this device (--help: all options), or calibrate a plan by its run.

    `pipeplan profile PLAN.json MEASURED.json -o CALIBRATED.json` derives costs of layers and links
    from a measured run of a plan.
    """
    if context.args and is_graph_file(context.args[0]):
        calibration()(context.args, prog_name="pipeplan profile")
    _run("executor.profiling", context.args)


def _run(module: str, words: Sequence[str]) -> None:
    # The executor needs nothing of the planner's command line, and GPU machines may not have it.
    command = [sys.executable, "-m", module, *words]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def calibration() -> Any:
    """Return the command that calibrates, as ``profile`` runs it for a plan."""
    app = typer.Typer(
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(_calibrate)
    return typer.main.get_command(app)


def _calibrate(
    path: PlanArgument,
    measured: Annotated[
        Path,
        typer.Argument(
            metavar="MEASURED", help="measured timeline (from the executor's --timeline)"
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="calibrated plan to write")],
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph", help="also write its layer graph (JSON), for `pipeplan plan MODEL --costs`"
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", help="also write its cluster (TOML or JSON, by file name)"),
    ] = None,
    links_only: Annotated[
        bool, typer.Option("--links-only", help="calibrate links only and keep the layers' times")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Derive costs of layers and links from a measured run."""
    with user_errors(as_json):
        from planner.interop.calibration import calibrate
        from planner.measured.timeline import MeasuredTimeline
        from planner.prediction import load_plan
        from planner.report.deviation import calibration_data, calibration_view
        from planner.verification import save_valid

        more = {"--graph": graph, "--cluster": cluster}
        suffixes = {"--graph": (".json",), "--cluster": (".toml", ".json")}
        require_outputs({"--output": output, **more}, [measured], suffixes)
        require_outputs(more, [path])  # The calibrated plan itself may replace the plan.
        plan, timeline = load_plan(path), MeasuredTimeline.load(measured)
        with named(measured):
            result = calibrate(plan, timeline, links_only=links_only)
        save_valid(result.plan, output)
        if graph is not None:
            result.plan.single_device_problem.graph.save(graph)
        if cluster is not None:
            result.plan.cluster.save(cluster)
        if as_json:
            print_json({"plan": str(output), **calibration_data(result)})
        else:
            show(
                *calibration_view(result),
                *(f"wrote {path}" for path in (output, graph, cluster) if path is not None),
            )


KINDS = (
    *("plan", "graph", "cluster", "job", "runtime", "train"),
    *("costs", "sweep", "sync-trace", "moves"),
)


def verify(
    path: Annotated[Path | None, typer.Argument(metavar="PLAN", help="plan file")] = None,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="also check the certificate of the lower bound, say what it proves, and refuse "
            "the plan if it proves nothing",
        ),
    ] = False,
    runtime: RunByOption = None,
    schema: Annotated[
        str | None,
        typer.Option(
            "--schema",
            metavar="KIND",
            help="print instead the JSON Schema of a kind of file (fields, types, ranges, units, "
            f"meanings): {', '.join(KINDS)}",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a plan is valid; print the reasons and exit with status 1 if not."""
    with user_errors(as_json and schema is None):
        if (path is None) is (schema is None):
            raise PipeplanError("PLAN: name a plan file, or --schema KIND instead")
        if schema is not None:
            typer.echo(_schema(schema), nl=False)
        elif path is not None:
            _verify(path, prove, runtime, as_json=as_json)


def _verify(path: Path, prove: bool, runtime: str | None, *, as_json: bool) -> None:
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


def _schema(kind: str) -> str:
    from planner.schemas import ARTIFACTS, schema_text

    if kind not in KINDS:
        raise PipeplanError(
            f"--schema {shorten(kind)}: there is no such kind; there are {', '.join(KINDS)}"
        )
    if kind in ARTIFACTS:
        return schema_text(ARTIFACTS[kind])
    # A training file is the executor's, which the planner does not import.
    command = [sys.executable, "-m", "executor.launch.train_schema"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
