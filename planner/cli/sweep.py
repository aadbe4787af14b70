"""``pipeplan sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import JobOption, JsonOption, ModelArgument, SetOption
from planner.cli.output import user_errors
from planner.cli.sweeping import SweepRequest, make_sweep, whole_numbers


def sweep(
    model: ModelArgument,
    cluster: Annotated[
        list[Path],
        typer.Option("--cluster", help="cluster file (TOML); may be repeated, to compare them"),
    ],
    job: JobOption = None,
    set_: SetOption = None,
    costs: Annotated[
        list[Path] | None,
        typer.Option("--costs", metavar="FILE", help="measured times: profiles; may be repeated"),
    ] = None,
    microbatch_samples: Annotated[
        str | None,
        typer.Option(
            "--microbatch-samples", metavar="N,…", help="sizes of a microbatch; default the job's"
        ),
    ] = None,
    microbatches: Annotated[
        str | None,
        typer.Option(
            "--microbatches", metavar="N,…", help="microbatches an iteration; default the job's"
        ),
    ] = None,
    keep_batch: Annotated[
        bool,
        typer.Option(
            "--keep-batch", help="as many microbatches as keep the job's samples an iteration"
        ),
    ] = False,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="N,…", help="paid for: devices (in use) or machines (whole ones)"
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="folder of plans and index; a sweep in it is resumed"),
    ] = Path("sweep"),
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            help="of each point; with --deterministic in CP-SAT's own seconds, of 1 to 10 s",
        ),
    ] = 10.0,
    gap: Annotated[
        float, typer.Option("--gap", help="end a point once time / bound - 1 is this small")
    ] = 1e-4,
    seed: Annotated[int, typer.Option("--seed", help="of the solver")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            help="solver threads of each point; default the machine's cores / processes, at most 8",
        ),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="the same plans on every run and machine")
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", help="points solved at once on this machine")
    ] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="solve points on a Ray cluster: auto, local or HOST:PORT; needs the extra ray",
        ),
    ] = None,
    bill: Annotated[
        str,
        typer.Option(
            "--bill",
            metavar="WHAT",
            help="paid for: devices (in use) or machines (whole ones)",
        ),
    ] = "devices",
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="chart of the front: .png or .svg")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan at many batch sizes, device counts and clusters; compare time and cost a sample."""
    with user_errors():
        make_sweep(
            SweepRequest(
                model=model,
                clusters=tuple(cluster),
                job=job,
                model_arguments=set_,
                costs=tuple(costs or ()),
                samples=whole_numbers("--microbatch-samples", microbatch_samples),
                microbatches=whole_numbers("--microbatches", microbatches),
                keep_batch=keep_batch,
                devices=whole_numbers("--devices", devices),
                output=output,
                time_limit_s=time_limit,
                gap_limit=gap,
                seed=seed,
                workers=workers,
                deterministic=deterministic,
                processes=processes,
                ray=ray,
                bill=bill,
                plot=plot,
            ),
            as_json=as_json,
        )
