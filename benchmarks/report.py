"""What every report has in common: the machine, the versions, tables."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata


def heading(title: str, command: str) -> str:
    """Title, command, machine, date and versions."""
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
