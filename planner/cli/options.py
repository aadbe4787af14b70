"""Arguments and options that several commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="module:factory (imports its code), hf:ClassName or hf:CONFIG.json (Hugging Face "
        "transformers), or a graph.json from `pipeplan trace`",
    ),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="plan file")]
ClusterOption = Annotated[
    Path,
    typer.Option("--cluster", help="cluster file (TOML)"),
]
JobOption = Annotated[
    Path | None,
    typer.Option("--job", help="job file (TOML or JSON)"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="set a model argument, overriding the job's; may be repeated",
    ),
]
CostsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="measured costs: a profile, or the graph from `calibrate --graph`; may be repeated",
    ),
]
RuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME",
        help="keep to plans that this runtime can run as planned, under its rules: pipeplan, "
        "torch, torchtitan, megatron, megatron-blocking, deepspeed, or a file of your own "
        "(default: the job's, else pipeplan, which runs every plan)",
    ),
]
RunByOption = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME",
        help="predict as this runtime would run it: pipeplan, torch, torchtitan, megatron, "
        "megatron-blocking, deepspeed, or a file of your own (default: the plan's)",
    ),
]
TensorParallelOption = Annotated[
    str | None,
    typer.Option(
        "--tensor-parallel",
        metavar="N|any",
        help="have groups of N devices run every layer together; any: the best number (default: "
        "the job's, else 1)",
    ),
]
SequenceParallelOption = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel",
        help="with --tensor-parallel: share values between the split parts of layers by positions",
    ),
]
ExpertParallelOption = Annotated[
    bool,
    typer.Option(
        "--expert-parallel",
        help="with --tensor-parallel: give the devices of a group whole experts, not shares of all",
    ),
]
PlanOutputOption = Annotated[Path, typer.Option("-o", "--output", help="plan file to write")]
AgainstOption = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="MEASURED",
        help="compare with a measured timeline (from the executor's --timeline)",
    ),
]
EpochOption = Annotated[
    int | None,
    typer.Option(
        "--epoch-samples",
        metavar="N",
        min=1,
        max=2**63 - 1,
        help="samples of the data set, to show what an epoch takes and costs (default: the job's)",
    ),
]
MemoryMarginOption = Annotated[
    str | None,
    typer.Option(
        "--memory-margin",
        metavar="SHARE|GIB",
        help="memory to leave free on every device, as 6% or 2GiB (default: none); it counts as "
        "reserved in the plan's cluster",
    ),
]
LogOption = Annotated[
    bool,
    typer.Option("--log", help="show what each step of the search took and brought"),
]
NoCheckOption = Annotated[
    bool,
    typer.Option("--no-check", help="do not compare two small steps with eager autograd first"),
]
DeterministicOption = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="give the same result on every run and machine (one thread, limits in solver work)",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="seed of the solver")]
WorkersOption = Annotated[
    int, typer.Option("--workers", show_default="one per core, at most 8", help="solver threads")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="print one JSON document instead of tables")
]
