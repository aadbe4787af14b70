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
ClusterOption = Annotated[Path, typer.Option("--cluster", help="cluster file (TOML)")]
JobOption = Annotated[Path | None, typer.Option("--job", help="job file (TOML or JSON)")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="set a field of the job, such as tensor_parallel=2, or an argument of the model, over "
        "the job file's; may be repeated",
    ),
]
CostsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="measured costs: a profile, or the graph of a calibration; may be repeated",
    ),
]
RuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME",
        help="keep to plans that this runtime can run, under its rules: pipeplan, torch, "
        "torchtitan, megatron, megatron-blocking, deepspeed, or a file of your own (default: the "
        "job's, else pipeplan, which runs every plan)",
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
PlanOutputOption = Annotated[Path, typer.Option("-o", "--output", help="plan file to write")]
AgainstOption = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="MEASURED",
        help="compare with a measured timeline (from the executor's --timeline)",
    ),
]
MemoryMarginOption = Annotated[
    str | None,
    typer.Option(
        "--memory-margin",
        metavar="SHARE|GIB",
        help="memory to leave free on every device, as 6% or 2GiB; it counts as reserved in the "
        "plan's cluster",
    ),
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
TimeLimitOption = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="limit of the search; with --deterministic in units of work that take 1 to 10 s each",
    ),
]
WorkersOption = Annotated[
    int, typer.Option("--workers", show_default="one per core, at most 8", help="solver threads")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="print one JSON document instead of tables")
]
