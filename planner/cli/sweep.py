"""``pipeplan sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli import completion
from planner.cli.options import JobOption, JsonOption, ModelArgument, SeedOption, SetOption
from planner.cli.output import user_errors
from planner.cli.sweeping import SweepRequest, make_sweep, whole_numbers

ClustersOption = Annotated[
    list[Path],
    typer.Option(
        "--cluster",
        help="cluster file (TOML); may be repeated, to compare them",
        autocompletion=completion.clusters,
    ),
]
CostsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="measured times: profiles; may be repeated",
        autocompletion=completion.plans,
    ),
]
SamplesOption = Annotated[
    str | None,
    typer.Option(
        "--microbatch-samples", metavar="N,…", help="sizes of a microbatch; default the job's"
    ),
]
MicrobatchesOption = Annotated[
    str | None,
    typer.Option(
        "--microbatches", metavar="N,…", help="microbatches an iteration; default the job's"
    ),
]
KeepBatchOption = Annotated[
    bool,
    typer.Option(
        "--keep-batch", help="as many microbatches as keep the job's samples an iteration"
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option("--devices", metavar="N,…", help="how many devices a plan may use; default all"),
]
OutputOption = Annotated[
    Path,
    typer.Option("-o", "--output", help="folder of plans and index; a sweep in it is resumed"),
]
TimeLimitOption = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="of each point; with --deterministic in CP-SAT's own seconds, of 1 to 10 s",
    ),
]
GapOption = Annotated[
    float, typer.Option("--gap", help="end a point once time / bound - 1 is this small")
]
PointWorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        help="solver threads of each point; default the machine's cores / processes, at most 8",
    ),
]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="the same plans on every run and machine")
]
ProcessesOption = Annotated[
    int, typer.Option("--processes", help="points solved at once on this machine")
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="solve points on a Ray cluster: auto, local or HOST:PORT; needs the extra ray",
    ),
]
BillOption = Annotated[
    str,
    typer.Option(
        "--bill",
        metavar="WHAT",
        help="paid for: devices (in use) or machines (whole ones)",
        autocompletion=completion.one_of("devices", "machines"),
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="chart of the front: .png or .svg")
]


def sweep(
    model: ModelArgument,
    cluster: ClustersOption,
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    microbatch_samples: SamplesOption = None,
    microbatches: MicrobatchesOption = None,
    keep_batch: KeepBatchOption = False,
    devices: DevicesOption = None,
    output: OutputOption = Path("sweep"),
    time_limit: TimeLimitOption = 10.0,
    gap: GapOption = 1e-4,
    seed: SeedOption = 0,
    workers: PointWorkersOption = None,
    deterministic: DeterministicOption = False,
    processes: ProcessesOption = 1,
    ray: RayOption = None,
    bill: BillOption = "devices",
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan at many batch sizes, device counts and clusters; compare time and cost a sample."""
    with user_errors(as_json):
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
