"""``pipeplan trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.models import graph_of, job_of
from planner.cli.options import JobOption, JsonOption, ModelArgument, SetOption
from planner.cli.output import print_json, print_rich, user_errors


def trace(
    model: ModelArgument,
    job: JobOption = None,
    set_: SetOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the layer graph as JSON")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a model computes, keeps and hands on, layer by layer."""
    with user_errors(as_json):
        graph = graph_of(model, job_of(job, set_))
        if output is not None:
            graph.save(output)
        if as_json:
            print_json(graph.record.model_dump(mode="json"))
            return
        from planner.report.layers import layer_table

        print_rich(layer_table(graph))
        if output is not None:
            typer.echo(f"wrote {output}", err=True)
