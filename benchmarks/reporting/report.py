"""Parts that all reports share: heading, tables, common options."""

import argparse
import os
import platform
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from planner import PipeplanError
from planner.search.settings import DEFAULT_WORKERS

_WRITTEN_TO = re.compile(r" --(output|keep)[ =]\S+")
NO_DATA = "Not run: it takes `--data FOLDER` with the public instances.\n"


def heading(title: str, command: str) -> str:
    """Title, command without the paths that results go to, machine, date and versions."""
    command = _WRITTEN_TO.sub("", command)
    packages = {name: metadata.version(name) for name in ("pipeplan", "torch", "ortools")}
    versions = {"Python": platform.python_version(), **packages}
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    made_with = ", ".join([machine, *(f"{name} {version}" for name, version in versions.items())])
    return f"# {title}\n\nMade by `{command}` on {datetime.now(UTC):%Y-%m-%d}; {made_with}.\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def add_options(parser: argparse.ArgumentParser, sections: Iterable[str]) -> None:
    """Add the options that every benchmark with sections has."""
    parser.add_argument("--time-limit", type=float, default=57.0, metavar="S")
    parser.add_argument("--rows", help="sections to run: " + ", ".join(sections))
    parser.add_argument("--output", type=Path, help="write the table to this file")
    parser.add_argument("--workers", type=int, default=DEFAULT_WORKERS)
    parser.add_argument("--seed", type=int, default=0)


def data_folder(text: str) -> Path:
    """Return the folder that an option names.

    Raises:
        ArgumentTypeError: if there is none.
    """
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    return Path(text)


def chosen_sections(rows: str | None, sections: Iterable[str]) -> list[str]:
    """The sections that ``--rows`` names, all of them if it was not given.

    Raises:
        PipeplanError: naming the unknown ones.
    """
    known = list(sections)
    names = rows.split(",") if rows else known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PipeplanError(
            f"--rows: {', '.join(unknown)} is not known; choose from {', '.join(known)}"
        )
    return names


def write_table(text: str, output: Path | None) -> None:
    """Write text to a file, or print it."""
    if output:
        output.write_text(text)
    else:
        print(text)
