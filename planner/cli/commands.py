"""All commands, in the order of the help page."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from planner.cli.adopt import adopt
from planner.cli.compare import compare
from planner.cli.explain import explain
from planner.cli.export import export
from planner.cli.import_ import import_
from planner.cli.inspect import detect, profile, trace, verify
from planner.cli.output import say
from planner.cli.plan import plan
from planner.cli.replan import replan
from planner.cli.report import report
from planner.cli.simulate import simulate
from planner.cli.sweep import sweep
from planner.errors import print_in_any_encoding


class _Notes(logging.Handler):
    """A log handler that writes to the current stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        is_note = record.levelno >= logging.WARNING
        head = "note" if is_note else record.name
        say(f"{head}: {record.getMessage()}", err=True)


def show_log(*, verbose: bool) -> None:
    """Show the planner's log on stderr.

    Args:
        verbose: every line with the name of its logger, not only warnings.
    """
    logger = logging.getLogger("planner")
    for handler in list(logger.handlers):
        if isinstance(handler, _Notes):
            logger.removeHandler(handler)
    logger.addHandler(_Notes())
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


app = typer.Typer(
    help="Find, check and run the fastest pipeline-parallel training plan for your cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from planner.assembly import version

        say(f"pipeplan {version('pipeplan')}")
        raise typer.Exit


@app.callback()
def _main(
    verbose: Annotated[
        bool, typer.Option("--verbose", help="log the solvers' progress on stderr")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    show_log(verbose=verbose)


app.command()(trace)
# Their options are the executor's, whose own help says what they are.
for measurement in (detect, profile):
    app.command(
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        }
    )(measurement)
app.command("import")(import_)
for command in (
    *(plan, adopt, compare, sweep, explain, simulate, verify),
    *(report, replan, export),
):
    app.command()(command)


def run() -> None:
    """Run the command that the process was started with."""
    print_in_any_encoding()
    app()
