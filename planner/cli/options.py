"""What several commands ask for in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli import completion

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="module:factory (its code is imported), hf:ClassName or hf:CONFIG.json of Hugging "
        "Face transformers, or a graph.json of `trace`",
        autocompletion=completion.plans,
    ),
]
PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="plan file", autocompletion=completion.plans)
]
ClusterOption = Annotated[
    Path,
    typer.Option("--cluster", help="cluster file (TOML)", autocompletion=completion.clusters),
]
JobOption = Annotated[
    Path | None,
    typer.Option("--job", help="job file (TOML or JSON)", autocompletion=completion.clusters),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="a model argument, over the job's; may be repeated"
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="of the solver")]
WorkersOption = Annotated[
    int, typer.Option("--workers", show_default="one a core, up to 8", help="solver threads")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="one JSON document on stdout instead of tables")
]
