"""The work of ``pipeplan sweep``: from its options to a folder of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.cli.models import (
    degrees_to_trace,
    given_rules,
    graph_of,
    is_graph_file,
    job_of,
    with_epoch,
    with_groups,
)
from planner.cli.output import console, print_json, say, show
from planner.errors import PipeplanError
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.analysis.sweep.engines import Engine
    from planner.analysis.sweep.rows import SweepRow
    from planner.analysis.sweep.run import SweepProgress, SweepResult
    from planner.cluster.cluster import Cluster
    from planner.interop.calibrate.costs import CostsFile
    from planner.job import Job
    from planner.model.layer_graph import LayerGraph
    from planner.plan.runtime_rules import RuntimeRules


@contextmanager
def shown_progress(
    limit: str, folder: Path, *, quiet: bool
) -> Iterator[Callable[[SweepProgress], None]]:
    """Print a line on stderr for each point, with a progress bar on terminals.

    Args:
        limit: of a point, such as ``10 s``.
        folder: of the sweep.
        quiet: show nothing.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if quiet:
        yield lambda progress: None
        return
    shown = console(stderr=True)
    columns = (
        TextColumn("points"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=shown, disable=not shown.is_terminal) as bar:
        task = bar.add_task("points", total=None)

        def show(progress: SweepProgress) -> None:
            line = _start_line(progress, limit, folder) if progress.row is None else _line(progress)
            shown.print(line, markup=False, highlight=False, soft_wrap=True)
            bar.update(task, total=progress.total, completed=progress.done)

        yield show


def _start_line(progress: SweepProgress, limit: str, folder: Path) -> str:
    left = progress.total - progress.done
    there = f", {progress.done} of them already in {folder}" if progress.done else ""
    return f"{plural(progress.total, 'point')}{there}; {left} to solve, up to {limit} each"


def _line(progress: SweepProgress) -> str:
    assert progress.row is not None, "of a point"
    return f"{progress.done}/{progress.total} {progress.row.point}: {_outcome(progress.row)}"


def _outcome(row: SweepRow) -> str:
    if row.iteration_time_s is None or row.time_per_sample_s is None:
        return f"no plan: {row.reason}"
    gap = "" if row.gap is None else f", gap {row.gap:.2%}"
    return (
        f"{format_seconds(row.iteration_time_s)} per iteration, "
        f"{format_seconds(row.time_per_sample_s)} per sample on "
        f"{plural(row.devices_used or 0, 'device')}{gap}"
    )


def show_sweep(result: SweepResult, *, as_json: bool) -> None:
    """Print the table, or all figures as JSON."""
    from planner.report.sweep import sweep_data, sweep_lines, sweep_table

    if as_json:
        print_json(sweep_data(result))
        return
    if result.rows:
        show(sweep_table(result))
    for line in sweep_lines(result):
        say(line)
    say(f"plans and index in {result.folder}")
    if result.others:
        say(f"the folder has {result.others} more points outside this sweep")


def draw_sweep(result: SweepResult, path: Path) -> None:
    """Write the chart, if there is anything to draw."""
    from planner.report.sweep import save_sweep_plot

    if all(row.plan is None for row in result.rows):
        say(f"note: {path} was not written: no point has a plan", err=True)
        return
    save_sweep_plot(result, path)
    say(f"wrote {path}", err=True)


@dataclass(frozen=True)
class SweepRequest:
    """The points to solve and the search settings; None or empty where an option was not given.

    Attributes:
        model, job, model_arguments, costs, runtime: as of ``pipeplan plan``.
        clusters: files.
        samples, microbatches, keep_batch, devices: the combinations.
        global_batch: samples of an iteration in place of the job's, which every point keeps.
        tensor_parallel, sequence_parallel, expert_parallel: as of ``pipeplan plan``.
        output: folder of plans and index.
        time_limit_s, gap_limit, seed, workers, deterministic: of each point's search.
        processes, ray: what solves the points.
        bill: what is paid for.
        plot: file of a chart.
        epoch_samples: of the data set, if that was given.
    """

    model: str
    clusters: tuple[Path, ...]
    job: Path | None
    model_arguments: list[str] | None
    costs: tuple[Path, ...]
    runtime: str | None
    samples: tuple[int, ...]
    microbatches: tuple[int, ...]
    keep_batch: bool
    devices: tuple[int, ...]
    output: Path
    time_limit_s: float
    gap_limit: float
    seed: int
    workers: int | None
    deterministic: bool
    processes: int
    ray: str | None
    bill: str
    plot: Path | None
    epoch_samples: int | None
    global_batch: int | None = None
    tensor_parallel: str | None = None
    sequence_parallel: bool = False
    expert_parallel: bool = False


def whole_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Parse distinct numbers separated by commas; empty if the option was not given.

    Raises:
        PipeplanError: for anything else.
    """
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise PipeplanError(
            f"{option} {text}: expected whole numbers separated by commas, such as 2,4,8"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def make_sweep(request: SweepRequest, *, as_json: bool) -> None:
    """Sweep, and show what was found.

    Args:
        request: what is swept and how.
        as_json: print JSON, and no progress.

    Raises:
        PipeplanError: naming what is wrong with the input.
        typer.Exit: with 130 after Ctrl-C, with 1 if no point has a plan.
    """
    from planner.interop.calibrate.costs import warn_of_types_without_costs

    clusters = _clusters(request.clusters)
    job = with_epoch(job_of(request.job, request.model_arguments), request.epoch_samples)
    job = with_groups(
        job,
        request.tensor_parallel,
        sequence_parallel=request.sequence_parallel,
        expert_parallel=request.expert_parallel,
    )
    request, job = _of_batch(request, job)
    rules = given_rules(request.runtime)
    _require_possible(request, clusters, job)
    costs = _costs(request)
    graphs = _graphs(request, clusters, job, costs, quiet=as_json)
    for path, cluster in zip(request.clusters, clusters.values(), strict=True):
        warn_of_types_without_costs(graphs[0], cluster, str(path))
    clusters = _with_steps(costs, clusters, job)
    result = _swept(request, graphs, clusters, job, rules, quiet=as_json)
    show_sweep(result, as_json=as_json)
    if request.plot is not None:
        draw_sweep(result, request.plot)
    if result.open:
        say(
            f"interrupted: {plural(len(result.open), 'point')} not solved yet; run the same "
            f"command again to resume",
            err=True,
        )
        raise typer.Exit(130)
    if all(row.plan is None for row in result.rows):
        raise typer.Exit(1)


def _of_batch(request: SweepRequest, job: Job) -> tuple[SweepRequest, Job]:
    """Return request and job with the batch of ``--global-batch`` and its microbatch sizes.

    Raises:
        PipeplanError: if other options fix the batch too, or it cannot be divided.
    """
    from planner.analysis.sweep.points import sizes_of

    batch = request.global_batch
    if batch is None:
        return request, job
    if request.microbatches or request.keep_batch:
        option = "--microbatches" if request.microbatches else "--keep-batch"
        raise PipeplanError(f"{option}: --global-batch fixes the batch already; leave one out")
    sizes = request.samples or sizes_of(batch)
    if batch % sizes[0]:
        raise PipeplanError(
            f"--global-batch {batch}: cannot be divided into microbatches of {sizes[0]} samples; "
            "change it or --microbatch-samples"
        )
    fields = {"samples_per_microbatch": sizes[0], "microbatches": batch // sizes[0]}
    job = type(job).parse({**job.model_dump(mode="json"), **fields}, f"--global-batch {batch}")
    return replace(request, samples=sizes, keep_batch=True), job


def _clusters(paths: tuple[Path, ...]) -> dict[str, Cluster]:
    """Load the clusters, by the names of their files."""
    from planner.cluster.cluster import Cluster

    found: dict[str, Path] = {}
    for path in paths:
        if path.stem in found:
            raise PipeplanError(
                f"--cluster {path}: has the same file name as {found[path.stem]}, and points are "
                f"named after it; rename one"
            )
        found[path.stem] = path
    return {label: Cluster.load(path) for label, path in found.items()}


def _require_possible(request: SweepRequest, clusters: Mapping[str, Cluster], job: Job) -> None:
    """Refuse wrong settings before the model is traced, which may take long."""
    from planner.analysis.sweep.engines import Processes, require_ray
    from planner.analysis.sweep.folder import require_folder
    from planner.analysis.sweep.points import batches_of, points_of
    from planner.analysis.sweep.rows import currency_of, require_bill
    from planner.records.document import require_file_path
    from planner.report.figures import require_format
    from planner.search.settings import check_settings

    workers = 1 if request.workers is None else request.workers
    check_settings(request.time_limit_s, request.gap_limit, request.seed, workers)
    require_bill(request.bill)
    currency_of(clusters)
    Processes(request.processes)
    if request.ray is not None and request.processes != 1:
        raise PipeplanError("--processes cannot be combined with --ray; remove one")
    if request.ray is not None:
        require_ray()
    batches = batches_of(job, request.samples, request.microbatches, keep_batch=request.keep_batch)
    points_of(clusters, batches, request.devices)
    if is_graph_file(request.model) and request.model_arguments:
        raise PipeplanError(
            f"--set {request.model_arguments[0]}: {request.model} is a traced graph, so model "
            f"arguments have no effect; trace the model again with it"
        )
    require_folder(request.output)
    if request.plot is not None:
        require_format(request.plot)
        if request.plot.resolve().parent != request.output.resolve():
            require_file_path(request.plot)


def _costs(request: SweepRequest) -> list[CostsFile]:
    from planner.interop.calibrate.costs import read_costs

    return [read_costs(path, "--costs") for path in request.costs]


def _graphs(
    request: SweepRequest,
    clusters: Mapping[str, Cluster],
    job: Job,
    costs: Sequence[CostsFile],
    *,
    quiet: bool,
) -> list[LayerGraph]:
    """Return the model's graph at each microbatch size, with the given measured times."""
    from planner.interop.calibrate.costs import with_costs

    sizes = request.samples or (job.samples_per_microbatch,)
    types = {name: kind for c in clusters.values() for name, kind in c.device_types.items()}
    any_cluster = next(iter(clusters.values())).model_copy(update={"device_types": types})
    degrees = sorted({d for c in clusters.values() for d in degrees_to_trace(job, c)})
    found = []
    for samples in sizes:
        if not quiet and len(sizes) > 1 and not is_graph_file(request.model):
            say(f"tracing {request.model} with {samples} samples per microbatch", err=True)
        sized = job.model_copy(update={"samples_per_microbatch": samples})
        graph = _graph(request.model, sized, degrees)
        for file in costs:
            graph = with_costs(graph, any_cluster, file)
        found.append(graph)
    return found


def _with_steps(
    costs: Sequence[CostsFile], clusters: Mapping[str, Cluster], job: Job
) -> dict[str, Cluster]:
    """Return the clusters with the optimizer's step as profiled."""
    from planner.interop.calibrate.costs import with_optimizer_costs

    found = dict(clusters)
    for file in costs:
        found = {name: with_optimizer_costs(cluster, job, file) for name, cluster in found.items()}
    return found


def _graph(model: str, job: Job, degrees: Sequence[int]) -> LayerGraph:
    """Trace or read the graph; a graph from a file is scaled to the size."""
    from planner.variants.microbatches import IN_PROPORTION, with_samples

    graph = graph_of(model, job, degrees)
    if not is_graph_file(model):
        return graph
    samples, traced = job.samples_per_microbatch, graph.record.samples_per_microbatch
    if samples != traced:
        say(
            f"note: {model} was traced with {traced} samples per microbatch; figures for {samples} "
            f"assume "
            f"{IN_PROPORTION}",
            err=True,
        )
    return with_samples(graph, samples)


def _swept(
    request: SweepRequest,
    graphs: list[LayerGraph],
    clusters: Mapping[str, Cluster],
    job: Job,
    rules: RuntimeRules | None,
    *,
    quiet: bool,
) -> SweepResult:
    from planner.analysis.sweep.run import sweep
    from planner.plan.problem import ModelSource

    factory = None if is_graph_file(request.model) else request.model
    seconds = "deterministic s" if request.deterministic else "s"
    limit = f"{request.time_limit_s:g} {seconds}"
    with shown_progress(limit, request.output, quiet=quiet) as progress:
        return sweep(
            graphs,
            clusters,
            job,
            request.output,
            microbatches=request.microbatches,
            keep_batch=request.keep_batch,
            devices=request.devices,
            source=ModelSource(factory, dict(job.model_arguments)),
            time_limit_s=request.time_limit_s,
            gap_limit=request.gap_limit,
            seed=request.seed,
            deterministic=request.deterministic,
            workers=request.workers,
            engine=_engine(request),
            bill=request.bill,
            runtime=rules,
            progress=progress,
        )


def _engine(request: SweepRequest) -> Engine:
    from planner.analysis.sweep.engines import InTurn, Processes, RayEngine

    if request.ray is not None:
        return RayEngine(request.ray)
    return InTurn() if request.processes == 1 else Processes(request.processes)
