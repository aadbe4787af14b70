"""All commands, in the order in which they are used."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.cli.adopt import adopt
from planner.cli.calibrate import calibrate
from planner.cli.compare import compare
from planner.cli.explain import explain
from planner.cli.export import export
from planner.cli.import_ import import_
from planner.cli.inspect import plot, verify
from planner.cli.log import show_log
from planner.cli.migrate import migrate
from planner.cli.plan import plan
from planner.cli.presets import presets
from planner.cli.profile import profile
from planner.cli.replan import replan
from planner.cli.report import report
from planner.cli.schedule import schedule
from planner.cli.schema import schema
from planner.cli.simulate import simulate
from planner.cli.sweep import sweep
from planner.cli.trace import trace

app = typer.Typer(
    help="The fastest way to run pipeline-parallel training on the machines you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from planner.assemble import version

        typer.echo(f"pipeplan {version('pipeplan')}")
        raise typer.Exit


@app.callback()
def _main(
    verbose: Annotated[
        bool, typer.Option("--verbose", help="log on stderr what the solvers do")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    show_log(verbose=verbose)


app.command("import")(import_)
# Its options are the executor's, whose own help says what they are.
app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)(profile)
COMMANDS = (
    trace,
    plan,
    adopt,
    schedule,
    compare,
    sweep,
    replan,
    verify,
    simulate,
    calibrate,
    explain,
    plot,
    report,
    export,
    presets,
    schema,
    migrate,
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Entry point of the command ``pipeplan``."""
    app()
