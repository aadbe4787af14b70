"""The options of ``pipeplan sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import (
    CostsOption,
    DeterministicOption,
    EpochOption,
    ExpertParallelOption,
    JobOption,
    JsonOption,
    ModelArgument,
    RuntimeOption,
    SeedOption,
    SequenceParallelOption,
    SetOption,
    TensorParallelOption,
)
from planner.cli.output import user_errors
from planner.cli.sweeping import SweepRequest, make_sweep, whole_numbers

ClustersOption = Annotated[
    list[Path],
    typer.Option(
        "--cluster",
        help="cluster file (TOML); may be repeated, to compare them",
    ),
]
SamplesOption = Annotated[
    str | None,
    typer.Option(
        "--microbatch-samples",
        metavar="N,…",
        help="microbatch sizes, such as 2,4,8 (default: the job's)",
    ),
]
MicrobatchesOption = Annotated[
    str | None,
    typer.Option(
        "--microbatches", metavar="N,…", help="microbatches per iteration (default: the job's)"
    ),
]
KeepBatchOption = Annotated[
    bool,
    typer.Option(
        "--keep-batch",
        help="choose the number of microbatches so that the samples per iteration stay the job's",
    ),
]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        metavar="N",
        min=1,
        help="samples of an iteration, kept at every microbatch size (default sizes: powers of two "
        "up to 16 that divide it)",
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="N,…", help="numbers of devices a plan may use (default: all)"
    ),
]
OutputOption = Annotated[
    Path,
    typer.Option("-o", "--output", help="folder for plans and index; an existing sweep is resumed"),
]
TimeLimitOption = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="time limit per point; with --deterministic in CP-SAT's deterministic seconds, each "
        "of which takes 1 to 10 s",
    ),
]
GapOption = Annotated[
    float,
    typer.Option("--gap", help="finish a point when its gap (time / bound - 1) is at most this"),
]
PointWorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        help="solver threads per point (default: the machine's cores / processes, at most 8)",
    ),
]
ProcessesOption = Annotated[
    int,
    typer.Option("--processes", help="number of points solved at the same time on this machine"),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="solve points on a Ray cluster: auto, local or HOST:PORT; needs pipeplan[ray]",
    ),
]
BillOption = Annotated[
    str,
    typer.Option(
        "--bill",
        metavar="WHAT",
        help="what is paid for: devices (those in use) or machines (whole machines)",
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", help="chart of the Pareto front to write (.png or .svg)"
    ),
]


def sweep(
    model: ModelArgument,
    cluster: ClustersOption,
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    runtime: RuntimeOption = None,
    microbatch_samples: SamplesOption = None,
    microbatches: MicrobatchesOption = None,
    keep_batch: KeepBatchOption = False,
    global_batch: GlobalBatchOption = None,
    tensor_parallel: TensorParallelOption = None,
    sequence_parallel: SequenceParallelOption = False,
    expert_parallel: ExpertParallelOption = False,
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
    epoch_samples: EpochOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan for many batch sizes, device counts and clusters; compare time and cost per sample."""
    with user_errors(as_json):
        make_sweep(
            SweepRequest(
                model=model,
                clusters=tuple(cluster),
                job=job,
                model_arguments=set_,
                costs=tuple(costs or ()),
                runtime=runtime,
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
                epoch_samples=epoch_samples,
                global_batch=global_batch,
                tensor_parallel=tensor_parallel,
                sequence_parallel=sequence_parallel,
                expert_parallel=expert_parallel,
            ),
            as_json=as_json,
        )
