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
    read_all_costs,
    require_no_arguments,
    source_of,
    traced,
    with_measured_costs,
)
from planner.errors import PipeplanError
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.analysis.sweep.rows import SweepRow
    from planner.analysis.sweep.run import Progress, SweepResult
    from planner.cluster.cluster import Cluster
    from planner.job import Job
    from planner.model.layer_graph import LayerGraph


ClustersOption = Annotated[
    list[Path],
    typer.Option("--cluster", help="cluster file (TOML); may be repeated, to compare them"),
]
SizesOption = Annotated[
    str | None,
    typer.Option(
        "--microbatch-samples",
        metavar="N,…",
        help="microbatch sizes, such as 2,4,8 (default: the job's)",
    ),
]
CountsOption = Annotated[
    str | None,
    typer.Option(
        "--microbatches", metavar="N,…", help="microbatches per iteration (default: the job's)"
    ),
]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        metavar="N",
        min=1,
        help="samples of an iteration, kept at every microbatch size (default sizes: powers of "
        "two up to 16 that divide it)",
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="N,…", help="numbers of devices a plan may use (default: all)"
    ),
]
FolderOption = Annotated[
    Path,
    typer.Option("-o", "--output", help="folder for plans and index; an existing sweep is resumed"),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="solve points on a Ray cluster: auto (this machine's), local (start one here) or "
        "HOST:PORT (needs pipeplan[ray])",
    ),
]


def sweep(
    model: ModelArgument,
    cluster: ClustersOption,
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    microbatch_samples: SizesOption = None,
    microbatches: CountsOption = None,
    global_batch: GlobalBatchOption = None,
    devices: DevicesOption = None,
    output: FolderOption = Path("sweep"),
    time_limit: TimeLimitOption = 10.0,
    deterministic: DeterministicOption = False,
    ray: RayOption = None,
    runtime: RuntimeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan for many batch sizes, device counts and clusters; compare time and cost per sample."""
    with user_errors(as_json):
        from planner.analysis.sweep.engines import Limits
        from planner.analysis.sweep.points import batches_of, points_of, sizes_of
        from planner.analysis.sweep.rows import currency_of
        from planner.analysis.sweep.run import require_folder
        from planner.analysis.sweep.run import sweep as sweep_points

        sizes = _whole_numbers("--microbatch-samples", microbatch_samples)
        counts = _whole_numbers("--microbatches", microbatches)
        numbers = _whole_numbers("--devices", devices)
        clusters, the_job = _clusters(cluster), job_of(job, set_)
        sizes = sizes or (() if global_batch is None else sizes_of(global_batch))
        rules = given_rules(runtime)
        require_no_arguments(model, set_ or ())
        # All that can be refused before the model is traced, which may take long.
        currency_of(clusters)
        points_of(clusters, batches_of(the_job, sizes, counts, global_batch), numbers)
        Limits(time_limit, 0, deterministic)
        require_folder(output)
        files = read_all_costs(costs or ())
        graphs = _graphs(model, sizes, clusters, the_job, quiet=as_json)
        graphs, clusters = with_measured_costs(graphs, clusters, the_job, files)
        result = sweep_points(
            graphs,
            clusters,
            the_job,
            output,
            microbatches=counts,
            global_batch=global_batch,
            devices=numbers,
            source=source_of(model, the_job),
            time_limit_s=time_limit,
            deterministic=deterministic,
            ray=ray,
            runtime=rules,
            progress=_progress(time_limit, deterministic, output, quiet=as_json),
        )
        _show(result, as_json=as_json)


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


def _graphs(
    model: str, sizes: Sequence[int], clusters: Mapping[str, Cluster], job: Job, *, quiet: bool
) -> list[LayerGraph]:
    """Return the model's graph at each microbatch size; one in a file has its own size."""
    degrees = sorted({d for cluster in clusters.values() for d in degrees_to_trace(job, cluster)})
    found = []
    for samples in sizes or (job.samples_per_microbatch,):
        if not quiet and len(sizes) > 1 and not is_graph_file(model):
            say(f"tracing {model} with {samples} samples per microbatch", err=True)
        sized = job.model_copy(update={"samples_per_microbatch": samples})
        graph = traced(model, sized, degrees)[0]
        traced_samples = graph.record.samples_per_microbatch
        if traced_samples != samples:
            raise PipeplanError(
                f"{model}: was traced with {traced_samples} samples per microbatch, not {samples}; "
                f"name the model, or give --microbatch-samples {traced_samples}"
            )
        found.append(graph)
    return found


def _progress(limit_s: float, deterministic: bool, folder: Path, *, quiet: bool) -> Progress:
    """Return a function that prints the start of a sweep, and each point as it is done."""
    limit = f"{limit_s:g} {'deterministic s' if deterministic else 's'}"

    def show_point(done: int, total: int, row: SweepRow | None) -> None:
        if quiet:
            return
        if row is not None:
            say(f"{done}/{total} {row.point}: {_outcome(row)}", err=True)
            return
        there = f", {done} of them already in {folder}" if done else ""
        text = f"{plural(total, 'point')}{there}; {total - done} to solve, up to {limit} each"
        say(text, err=True)

    return show_point


def _outcome(row: SweepRow) -> str:
    if row.iteration_time_s is None or row.time_per_sample_s is None:
        return f"no plan: {row.reason}"
    gap = "" if row.gap is None else f", gap {row.gap:.2%}"
    return (
        f"{format_seconds(row.iteration_time_s)} per iteration, "
        f"{format_seconds(row.time_per_sample_s)} per sample on "
        f"{plural(len(row.used), 'device')}{gap}"
    )


def _show(result: SweepResult, *, as_json: bool) -> None:
    """Print the table or all figures, and end with the sweep's status.

    Raises:
        typer.Exit: with 130 after Ctrl-C, with 1 if no point has a plan.
    """
    from planner.report.sweep import sweep_data, sweep_lines, sweep_table

    if as_json:
        print_json(sweep_data(result))
    else:
        show(*([sweep_table(result)] if result.rows else []), *sweep_lines(result))
        say(f"plans and index in {result.folder}")
    if result.open:
        say(
            f"interrupted: {plural(len(result.open), 'point')} not solved yet; run the same "
            f"command again to resume",
            err=True,
        )
        raise typer.Exit(130)
    if all(row.plan is None for row in result.rows):
        raise typer.Exit(1)
