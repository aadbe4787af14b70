"""``pipeplan sweep``: plans for many batch sizes, numbers of devices and clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import (
    CostsOption,
    DeterministicOption,
    JobOption,
    JsonOption,
    ModelArgument,
    RuntimeOption,
    SetOption,
    TimeLimitOption,
)
from planner.cli.output import print_json, say, show, user_errors
from planner.cli.problems import (
    degrees_to_trace,
    given_rules,
    is_graph_file,
    job_of,
    require_no_arguments,
    source_of,
    traced,
)
from planner.errors import PipeplanError
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.analysis.sweep.engines import Engine
    from planner.analysis.sweep.rows import SweepRow
    from planner.analysis.sweep.run import SweepResult
    from planner.cluster.cluster import Cluster
    from planner.interop.calibrate.costs import CostsFile
    from planner.job import Job
    from planner.model.layer_graph import LayerGraph


def sweep(
    model: ModelArgument,
    cluster: Annotated[
        list[Path],
        typer.Option("--cluster", help="cluster file (TOML); may be repeated, to compare them"),
    ],
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    microbatch_samples: Annotated[
        str | None,
        typer.Option(
            "--microbatch-samples",
            metavar="N,…",
            help="microbatch sizes, such as 2,4,8 (default: the job's)",
        ),
    ] = None,
    microbatches: Annotated[
        str | None,
        typer.Option(
            "--microbatches", metavar="N,…", help="microbatches per iteration (default: the job's)"
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            metavar="N",
            min=1,
            help="samples of an iteration, kept at every microbatch size (default sizes: powers of "
            "two up to 16 that divide it)",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="N,…", help="numbers of devices a plan may use (default: all)"
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="folder for plans and index; an existing sweep is resumed"
        ),
    ] = Path("sweep"),
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="chart of the Pareto front to write (.png or .svg)"
        ),
    ] = None,
    time_limit: TimeLimitOption = 10.0,
    deterministic: DeterministicOption = False,
    processes: Annotated[
        str,
        typer.Option(
            "--processes",
            metavar="N|RAY",
            help="points solved at the same time, which divide the cores of this machine, or a Ray "
            "cluster that solves them: ray:auto, ray:local or ray:HOST:PORT (needs pipeplan[ray])",
        ),
    ] = "1",
    runtime: RuntimeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan for many batch sizes, device counts and clusters; compare time and cost per sample."""
    with user_errors(as_json):
        from planner.analysis.sweep.points import batches_of, points_of
        from planner.analysis.sweep.rows import currency_of
        from planner.analysis.sweep.run import sweep as sweep_points
        from planner.interop.calibrate.costs import (
            read_costs,
            warn_of_types_without_costs,
            with_optimizer_costs,
        )
        from planner.search.settings import check_settings

        sizes = _whole_numbers("--microbatch-samples", microbatch_samples)
        counts = _whole_numbers("--microbatches", microbatches)
        numbers = _whole_numbers("--devices", devices)
        clusters, the_job = _clusters(cluster), job_of(job, set_)
        if global_batch is not None:
            the_job, sizes = _of_batch(the_job, global_batch, sizes, counts)
        rules, keep_batch = given_rules(runtime), global_batch is not None
        require_no_arguments(model, set_ or ())
        engine = _engine(processes)
        # All that can be refused before the model is traced, which may take long.
        currency_of(clusters)
        points_of(clusters, batches_of(the_job, sizes, counts), numbers)
        check_settings(time_limit, 0.0, 0, 1)
        _require_outputs(output, plot)
        files = [read_costs(path, "--costs") for path in costs or ()]
        graphs = _graphs(model, sizes, clusters, the_job, files, quiet=as_json)
        for path, (label, one) in zip(cluster, clusters.items(), strict=True):
            warn_of_types_without_costs(graphs[0], one, str(path))
            for file in files:
                clusters[label] = with_optimizer_costs(clusters[label], the_job, file)
        limit = f"{time_limit:g} {'deterministic s' if deterministic else 's'}"

        def show_point(done: int, total: int, row: SweepRow | None) -> None:
            if not as_json:
                text = _start(done, total, limit, output) if row is None else _outcome(row)
                say(text if row is None else f"{done}/{total} {row.point}: {text}", err=True)

        result = sweep_points(
            graphs,
            clusters,
            the_job,
            output,
            microbatches=counts,
            keep_batch=keep_batch,
            devices=numbers,
            source=source_of(model, the_job),
            time_limit_s=time_limit,
            deterministic=deterministic,
            engine=engine,
            runtime=rules,
            progress=show_point,
        )
        _show(result, plot, as_json=as_json)


def _whole_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Parse distinct numbers separated by commas; empty if the option was not given."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise PipeplanError(
            f"{option} {text}: expected whole numbers separated by commas, such as 2,4,8"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def _clusters(paths: Sequence[Path]) -> dict[str, Cluster]:
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


def _of_batch(
    job: Job, batch: int, sizes: tuple[int, ...], counts: tuple[int, ...]
) -> tuple[Job, tuple[int, ...]]:
    """Return the job with the batch of ``--global-batch``, and the microbatch sizes.

    Raises:
        PipeplanError: if another option fixes the batch too, or it cannot be divided.
    """
    from planner.analysis.sweep.points import batches_of, sizes_of

    if counts:
        raise PipeplanError("--microbatches: --global-batch fixes the batch already; leave one out")
    whole = {"samples_per_microbatch": 1, "microbatches": batch}
    sizes = sizes or sizes_of(batch)
    batches = batches_of(job.model_copy(update=whole), sizes, keep_batch=True)
    first = dict(zip(whole, batches[0], strict=True))
    return type(job).parse({**job.model_dump(mode="json"), **first}, "--global-batch"), sizes


def _engine(processes: str) -> Engine:
    """Return what solves the points."""
    from planner.analysis.sweep.engines import InTurn, Processes, RayEngine

    kind, _, address = processes.partition(":")
    if kind == "ray" and address:
        return RayEngine(address)
    if not processes.isdecimal():
        raise PipeplanError(
            f"--processes {processes}: expected a number of processes, or a Ray cluster such as "
            "ray:auto"
        )
    return InTurn() if int(processes) == 1 else Processes(int(processes))


def _require_outputs(output: Path, plot: Path | None) -> None:
    """Refuse files that cannot be written."""
    from planner.analysis.sweep.folder import require_folder
    from planner.records.document import require_file_path
    from planner.report.figures import require_format

    require_folder(output)
    if plot is not None:
        require_format(plot)
        if plot.resolve().parent != output.resolve():
            require_file_path(plot)


def _graphs(
    model: str,
    sizes: Sequence[int],
    clusters: Mapping[str, Cluster],
    job: Job,
    costs: Sequence[CostsFile],
    *,
    quiet: bool,
) -> list[LayerGraph]:
    """Return the model's graph at each microbatch size, with the given measured times."""
    from planner.interop.calibrate.costs import with_costs

    sizes = sizes or (job.samples_per_microbatch,)
    types = {name: kind for c in clusters.values() for name, kind in c.device_types.items()}
    any_cluster = next(iter(clusters.values())).model_copy(update={"device_types": types})
    degrees = sorted({d for c in clusters.values() for d in degrees_to_trace(job, c)})
    found = []
    for samples in sizes:
        if not quiet and len(sizes) > 1 and not is_graph_file(model):
            say(f"tracing {model} with {samples} samples per microbatch", err=True)
        graph = _graph(model, job.model_copy(update={"samples_per_microbatch": samples}), degrees)
        for file in costs:
            graph = with_costs(graph, any_cluster, file)
        found.append(graph)
    return found


def _graph(model: str, job: Job, degrees: Sequence[int]) -> LayerGraph:
    """Trace or read the graph; a graph from a file is scaled to the size."""
    from planner.variants.microbatches import IN_PROPORTION, with_samples

    graph = traced(model, job, degrees)[0]
    if not is_graph_file(model):
        return graph
    samples, before = job.samples_per_microbatch, graph.record.samples_per_microbatch
    if samples != before:
        say(
            f"note: {model} was traced with {before} samples per microbatch; figures for {samples} "
            f"assume {IN_PROPORTION}",
            err=True,
        )
    return with_samples(graph, samples)


def _start(done: int, total: int, limit: str, folder: Path) -> str:
    there = f", {done} of them already in {folder}" if done else ""
    return f"{plural(total, 'point')}{there}; {total - done} to solve, up to {limit} each"


def _outcome(row: SweepRow) -> str:
    if row.iteration_time_s is None or row.time_per_sample_s is None:
        return f"no plan: {row.reason}"
    gap = "" if row.gap is None else f", gap {row.gap:.2%}"
    return (
        f"{format_seconds(row.iteration_time_s)} per iteration, "
        f"{format_seconds(row.time_per_sample_s)} per sample on "
        f"{plural(len(row.used), 'device')}{gap}"
    )


def _show(result: SweepResult, plot: Path | None, *, as_json: bool) -> None:
    """Print the table or all figures, draw the chart, and end with the sweep's status.

    Raises:
        typer.Exit: with 130 after Ctrl-C, with 1 if no point has a plan.
    """
    from planner.report.sweep import save_sweep_plot, sweep_data, sweep_lines, sweep_table

    has_plan = any(row.plan is not None for row in result.rows)
    if as_json:
        print_json(sweep_data(result))
    else:
        show(*([sweep_table(result)] if result.rows else []), *sweep_lines(result))
        say(f"plans and index in {result.folder}")
    if plot is not None and has_plan:
        save_sweep_plot(result, plot)
        say(f"wrote {plot}", err=True)
    elif plot is not None:
        say(f"note: {plot} was not written: no point has a plan", err=True)
    if result.open:
        say(
            f"interrupted: {plural(len(result.open), 'point')} not solved yet; run the same "
            f"command again to resume",
            err=True,
        )
        raise typer.Exit(130)
    if not has_plan:
        raise typer.Exit(1)
