"""Printing: tables, one JSON document, and errors of the user's input."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, NoReturn

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


_document: ContextVar[IO[str] | None] = ContextVar("document", default=None)
"""Where the one JSON document of a command goes; None once it is written, or without ``--json``."""


@contextmanager
def user_errors(as_json: bool = False) -> Iterator[None]:
    """Print what is wrong with the input, without a traceback, and end with its exit status.

    Args:
        as_json: stdout holds exactly one JSON document, of :func:`print_json` or of the errors;
            whatever else is printed, by the user's own model say, goes to stderr.
    """
    token = _document.set(sys.stdout if as_json else None)
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext(), _usable_paths():
            yield
    except PipeplanError as error:
        _end([_as_option(problem) for problem in error.problems], "error: ", REFUSED)
    except KeyboardInterrupt as interrupt:
        _end([f"interrupted {interrupt}".rstrip()], "", INTERRUPTED)
    finally:
        _document.reset(token)


def _end(lines: Sequence[str], head: str, status: int) -> NoReturn:
    """Print why a command ends, also as the JSON document if there is none yet."""
    if _document.get() is not None:
        print_json({"error": lines})
    for line in lines:
        say(head + line, err=True)
    raise typer.Exit(status) from None


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
    **{name: f"--{name}" for name in ("lost", "added", "slack", "runtime")},
    **{"time_limit_s": "--time-limit", "gap_limit": "--gap", "pipeline_size": "--pipeline-size"},
}
"""Options by the name of the argument that they set, where no field of a file does."""


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


def require_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Iterable[Path | None] = (),
    suffixes: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Refuse files that cannot be written, before any work.

    Args:
        outputs: by the option that names them; None where it was not given.
        inputs: files that the command reads, which it never writes over.
        suffixes: that a file's name may end in, by option; any if an option is left out.

    Raises:
        PipeplanError: naming the file.
    """
    from planner.records.document import require_file_path

    taken = {path.resolve(): "an input file" for path in inputs if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        allowed = suffixes.get(option)
        if allowed and path.suffix.lower() not in allowed:
            names = " or ".join(allowed)
            raise PipeplanError(f"{option} {path}: expected a name that ends in {names}")
        require_file_path(path)
        if path.resolve() in taken:
            other = taken[path.resolve()]
            raise PipeplanError(
                f"{option} {path}: this is {other} of the command; choose another name"
            )
        taken[path.resolve()] = "another output"


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
    stream = _document.get()
    assert stream is not None, "a command prints one JSON document, within user_errors(as_json)"
    _document.set(None)
    typer.echo(json.dumps(data, indent=1), file=stream)
