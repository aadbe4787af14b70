"""Printing: tables, one JSON document, and errors of the user's input."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from planner.errors import INTERRUPTED, PipeplanError, printable, shorten

if TYPE_CHECKING:
    from rich.console import Console

    from planner.plan.plan import Plan
    from planner.report.tables import Table


REFUSED = 1
"""Exit statuses; docs/cli_conventions.md has all of them."""


def say(text: str = "", *, err: bool = False) -> None:
    """Print a line, to stderr if ``err``; what names from files contain is shown, never obeyed."""
    typer.echo(printable(text), err=err)


class _Document:
    """The one JSON document that a command with ``--json`` writes to stdout.

    Args:
        stream: stdout as it was; what else is printed meanwhile goes to stderr.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.is_written = False

    def write(self, data: Any) -> None:
        """Write the document, once."""
        assert not self.is_written, "a command has one JSON document"
        self.is_written = True
        typer.echo(json.dumps(data, indent=1), file=self._stream)


_document: ContextVar[_Document | None] = ContextVar("document", default=None)


@contextmanager
def user_errors(as_json: bool = False) -> Iterator[None]:
    """Print what is wrong with the input, without a traceback, and end with its exit status.

    Args:
        as_json: stdout holds exactly one JSON document, of :func:`print_json` or of the errors;
            whatever else is printed, by the user's own model say, goes to stderr.
    """
    try:
        with _one_document() if as_json else nullcontext(), _usable_paths():
            yield
    except PipeplanError as error:
        for problem in error.problems:
            say(f"error: {_as_option(problem)}", err=True)
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt as interrupt:
        say(_interrupted(interrupt), err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _usable_paths() -> Iterator[None]:
    """Name a path that the system cannot follow, wherever it is first looked at."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        raise PipeplanError(
            f"{shorten(error.filename)}: {error.strerror}; give the path of a file"
        ) from None
    except RuntimeError as error:
        # What Python before 3.13 says of a link that leads back to itself.
        if not str(error).startswith("Symlink loop from"):
            raise
        raise PipeplanError(f"{error}; give the path of a file") from None


def _as_option(problem: str) -> str:
    """Name the option in an error about the argument of a function."""
    name, colon, rest = problem.partition(":")
    return f"{_OPTIONS[name]}:{rest}" if colon and name in _OPTIONS else problem


_OPTIONS = {
    **{name: f"--{name}" for name in ("lost", "added", "slack", "runtime", "window")},
    **{"time_limit_s": "--time-limit", "gap_limit": "--gap", "pipeline_size": "--pipeline-size"},
}
"""Options by the name of the argument that they set, where no field of a file does."""


@contextmanager
def _one_document() -> Iterator[None]:
    """Write the errors as the JSON document if there is none yet when a command ends."""
    document = _Document(sys.stdout)
    token = _document.set(document)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except PipeplanError as error:
        if not document.is_written:
            document.write({"error": [_as_option(problem) for problem in error.problems]})
        raise
    except KeyboardInterrupt as interrupt:
        if not document.is_written:
            document.write({"error": [_interrupted(interrupt)]})
        raise
    finally:
        _document.reset(token)


def _interrupted(interrupt: KeyboardInterrupt) -> str:
    return f"interrupted {interrupt}".rstrip()


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Prefix errors about a file's contents with its name."""
    try:
        yield
    except PipeplanError as error:
        raise PipeplanError(f"{path}: {problem}" for problem in error.problems) from None


def show_plan(the_plan: Plan) -> None:
    """Print a plan's stages, devices and figures."""
    from planner.report.summary import plan_view
    from planner.simulation.simulator import simulate_plan

    show(*plan_view(the_plan, simulate_plan(the_plan)))


def keep_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to write over a file that the command reads.

    Raises:
        PipeplanError: naming the file.
    """
    for path in inputs:
        if path.exists() and output.exists() and path.samefile(output):
            raise PipeplanError(
                f"--output {output}: this is an input file of the command; choose another name"
            )


def show(*view: Table | str) -> None:
    """Print tables and lines."""
    for part in view:
        if isinstance(part, str):
            say(part)
        else:
            # Piped output is for reading too: do not fold tables at 80 columns.
            console(width=None if sys.stdout.isatty() else 120).print(part)
            say()


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return rich's console; names from files appear as :func:`say` prints them."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return PrintableConsole(stderr=stderr, width=width)


def print_json(data: Any) -> None:
    """Print plain data for programs, within :func:`user_errors` once."""
    document = _document.get()
    assert document is not None, "a command prints JSON within user_errors(as_json)"
    document.write(data)
