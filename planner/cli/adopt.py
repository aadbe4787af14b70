"""``pipeplan adopt``: a plan of what already runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.adopting import AdoptRequest, adopt_plan
from planner.cli.models import Asked
from planner.cli.options import ClusterOption, JobOption, JsonOption, ModelArgument, SetOption
from planner.cli.output import user_errors
from planner.cli.plan import CostsOption

OutputOption = Annotated[Path, typer.Option("-o", "--output", help="plan file to write")]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--megatron-layout",
        metavar="LAYOUT",
        help="stages as Megatron-LM's --pipeline-model-parallel-layout has them: 'Et*3|(tt|)*4,L'",
    ),
]
StagesOption = Annotated[
    Path | None,
    typer.Option(
        "--stages",
        metavar="FILE",
        help="JSON list of lists of layer or module names, as torchtitan's "
        "module_fqns_per_model_part",
    ),
]
SizeOption = Annotated[
    int | None,
    typer.Option(
        "--pipeline-size",
        metavar="N",
        help="ranks of a pipeline, stage i on rank i % N; default as many as stages",
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="gpipe, 1f1b, interleaved-1f1b, looped-breadth-first, eager-1f1b, pe, zb-h1, zb-h2, "
        "zb-auto, or zb-v, dualpipe-v on two stages a rank in a V; default 1f1b, "
        "interleaved-1f1b with several stages a rank",
    ),
]
TableOption = Annotated[
    Path | None,
    typer.Option(
        "--schedule-csv",
        metavar="FILE",
        help="schedule of torch.distributed.pipelining, a row a rank; it places the stages too",
    ),
]
ReplicasOption = Annotated[
    int,
    typer.Option(
        "--replicas",
        metavar="R",
        help="data parallelism: equal pipelines, each on its share of the microbatches",
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="NAME,…",
        help="of rank 0's replicas, then rank 1's, …; default the cluster's in its order",
    ),
]
RecomputeOption = Annotated[
    bool,
    typer.Option("--recompute", help="full activation checkpointing: every block runs again"),
]
OverflowOption = Annotated[
    bool,
    typer.Option(
        "--allow-overflow",
        help="write a plan that does not fit into memory, for `explain` and `simulate`",
    ),
]


def adopt(
    model: ModelArgument,
    cluster: ClusterOption,
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    megatron_layout: LayoutOption = None,
    stages: StagesOption = None,
    pipeline_size: SizeOption = None,
    schedule: ScheduleOption = None,
    schedule_csv: TableOption = None,
    replicas: ReplicasOption = 1,
    devices: DevicesOption = None,
    recompute: RecomputeOption = False,
    allow_overflow: OverflowOption = False,
    output: OutputOption = Path("plan.json"),
    as_json: JsonOption = False,
) -> None:
    """Make a plan of what you already run, for `explain`, `simulate` and `plan --warm-start`."""
    request = AdoptRequest(
        asked=Asked(model, cluster, job, tuple(set_ or ()), tuple(costs or ())),
        layout=megatron_layout,
        stages=stages,
        pipeline_size=pipeline_size,
        schedule=schedule,
        schedule_csv=schedule_csv,
        replicas=replicas,
        devices=devices,
        recompute=recompute,
    )
    with user_errors(as_json):
        adopt_plan(request, output, allow_overflow=allow_overflow, as_json=as_json)
