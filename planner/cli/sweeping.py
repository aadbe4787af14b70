"""The work of ``pipeplan sweep``: from what the command line asks for to a folder of plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.cli.models import graph_of, is_graph_file, job_of
from planner.cli.sweep_output import draw_sweep, show_sweep, shown_progress
from planner.errors import PipeplanError
from planner.units import plural

if TYPE_CHECKING:
    from planner.artifacts.cluster import Cluster
    from planner.artifacts.job import Job
    from planner.artifacts.layer_graph import LayerGraph
    from planner.sweeping import Engine, SweepResult


@dataclass(frozen=True)
class SweepRequest:
    """What is swept and how; None or empty where an option was not given.

    Attributes:
        model, job, model_arguments, costs: as of ``pipeplan plan``.
        clusters: files.
        samples, microbatches, keep_batch, devices: the combinations.
        output: folder of plans and index.
        time_limit_s, gap_limit, seed, workers, deterministic: of each point's search.
        processes, ray: what solves the points.
        bill: what is paid for.
        plot: file of a chart.
    """

    model: str
    clusters: tuple[Path, ...]
    job: Path | None
    model_arguments: list[str] | None
    costs: tuple[Path, ...]
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


def whole_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Numbers separated by commas, each once; none if the option was not given.

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
    clusters = _clusters(request.clusters)
    job = job_of(request.job, request.model_arguments)
    _require_possible(request, clusters, job)
    graphs = _graphs(request, clusters, job, quiet=as_json)
    result = _swept(request, graphs, clusters, job, quiet=as_json)
    show_sweep(result, as_json=as_json)
    if request.plot is not None:
        draw_sweep(result, request.plot)
    if result.open:
        typer.echo(
            f"interrupted: {plural(len(result.open), 'point')} still open; the same command goes "
            f"on where {result.folder} ends",
            err=True,
        )
        raise typer.Exit(130)
    if all(row.plan is None for row in result.rows):
        raise typer.Exit(1)


def _clusters(paths: tuple[Path, ...]) -> dict[str, Cluster]:
    """By the names of their files."""
    from planner.artifacts.cluster import Cluster

    found: dict[str, Path] = {}
    for path in paths:
        if path.stem in found:
            raise PipeplanError(
                f"--cluster {path}: points go by the name of the cluster's file, and "
                f"{found[path.stem]} has the same; rename one of them"
            )
        found[path.stem] = path
    return {label: Cluster.load(path) for label, path in found.items()}


def _require_possible(request: SweepRequest, clusters: Mapping[str, Cluster], job: Job) -> None:
    """What can be wrong is found before the model is traced, which may take a while."""
    from planner.artifacts.document import require_file_path
    from planner.report.figures import require_format
    from planner.solver import check_settings
    from planner.sweeping.engines import Processes
    from planner.sweeping.folder import require_folder
    from planner.sweeping.points import batches_of, points_of
    from planner.sweeping.ray_engine import require_ray
    from planner.sweeping.rows import currency_of, require_bill

    workers = 1 if request.workers is None else request.workers
    check_settings(request.time_limit_s, request.gap_limit, request.seed, workers)
    require_bill(request.bill)
    currency_of(clusters)
    Processes(request.processes)
    if request.ray is not None and request.processes != 1:
        raise PipeplanError("--processes: points run on Ray's machines; leave it or --ray out")
    if request.ray is not None:
        require_ray()
    batches = batches_of(job, request.samples, request.microbatches, keep_batch=request.keep_batch)
    points_of(clusters, batches, request.devices)
    if is_graph_file(request.model) and request.model_arguments:
        raise PipeplanError(
            f"--set {request.model_arguments[0]}: {request.model} was traced already; trace the "
            "model again with it"
        )
    require_folder(request.output)
    if request.plot is not None:
        require_format(request.plot)
        if request.plot.resolve().parent != request.output.resolve():
            require_file_path(request.plot)


def _graphs(
    request: SweepRequest, clusters: Mapping[str, Cluster], job: Job, *, quiet: bool
) -> list[LayerGraph]:
    """The model at each size of a microbatch, with the measured times that were given."""
    from planner.calibration.costs import with_costs

    sizes = request.samples or (job.samples_per_microbatch,)
    types = {name: kind for c in clusters.values() for name, kind in c.device_types.items()}
    any_cluster = next(iter(clusters.values())).model_copy(update={"device_types": types})
    found = []
    for samples in sizes:
        if not quiet and len(sizes) > 1 and not is_graph_file(request.model):
            typer.echo(f"tracing {request.model} with {samples} samples a microbatch", err=True)
        graph = _graph(request.model, job.model_copy(update={"samples_per_microbatch": samples}))
        for path in request.costs:
            graph = with_costs(graph, any_cluster, path, "--costs")
        found.append(graph)
    return found


def _graph(model: str, job: Job) -> LayerGraph:
    """Traced, or read; one that was read is brought to the size."""
    from planner.what_if.samples import IN_PROPORTION, with_samples

    graph = graph_of(model, job)
    if not is_graph_file(model):
        return graph
    samples, traced = job.samples_per_microbatch, graph.record.samples_per_microbatch
    if samples != traced:
        typer.echo(
            f"note: {model} was traced with {traced} samples a microbatch; {samples} assume "
            f"{IN_PROPORTION}",
            err=True,
        )
    return with_samples(graph, samples)


def _swept(
    request: SweepRequest,
    graphs: list[LayerGraph],
    clusters: Mapping[str, Cluster],
    job: Job,
    *,
    quiet: bool,
) -> SweepResult:
    from planner.artifacts.problem import ModelSource
    from planner.sweeping import sweep

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
            progress=progress,
        )


def _engine(request: SweepRequest) -> Engine:
    from planner.sweeping.engines import InTurn, Processes
    from planner.sweeping.ray_engine import RayEngine

    if request.ray is not None:
        return RayEngine(request.ray)
    return InTurn() if request.processes == 1 else Processes(request.processes)
