"""What a shell completes behind an option or in place of a file: quickly, and without a message.

Each function takes what was typed so far and gives what may stand there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MOST_FILES = 500
"""A shell shows no more; a folder of a sweep may hold thousands."""


def plans(incomplete: str) -> list[str]:
    """Files that may hold a plan, a graph or anything else in JSON."""
    return _files(incomplete, ".json")


def clusters(incomplete: str) -> list[str]:
    """Files that may hold a cluster or a job."""
    return _files(incomplete, ".toml", ".json")


def artifacts(incomplete: str) -> list[str]:
    """Files of any kind that Pipeplan writes or reads."""
    return _files(incomplete, ".json", ".toml")


def device_types(incomplete: str) -> list[str]:
    """Presets of devices."""
    from planner.artifacts.presets import DEVICES

    return _beginning(DEVICES, incomplete)


def export_targets(incomplete: str) -> list[str]:
    """Tools that plans are exported to."""
    from planner.export.targets import TARGETS

    return _beginning(TARGETS, incomplete)


def import_formats(incomplete: str) -> list[str]:
    """Kinds of files that are imported."""
    from planner.importing.formats import AUTO, CLUSTER_FORMATS, FORMATS

    return _beginning([AUTO, *FORMATS, *CLUSTER_FORMATS], incomplete)


def planners(incomplete: str) -> list[str]:
    """Names of classic planners, behind the last comma."""
    from planner.partition.planners import PLANNERS

    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    left = [name for name in PLANNERS if name not in taken]
    return [f"{before}{comma}{name}" for name in _beginning(left, last)]


def strategies(incomplete: str) -> list[str]:
    """Strategies of synchronisation, and the word for the one that suits."""
    from planner.cli.sync import CHOOSE
    from planner.sync.strategies import OPTIONS

    return _beginning([*OPTIONS, CHOOSE], incomplete)


def simulated_strategies(incomplete: str) -> list[str]:
    """The same, and the word for all of them."""
    from planner.cli.sync import ALL

    return [*strategies(incomplete), *_beginning([ALL], incomplete)]


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Completes one of a few words."""

    def complete(incomplete: str) -> list[str]:
        return _beginning(words, incomplete)

    return complete


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _files(incomplete: str, *suffixes: str) -> list[str]:
    """Files with a suffix in the folder that was typed, and those one folder below.

    Of a folder without any its name stands there, to go on from: a shell puts a space behind the
    only answer, so that folders whose files are known are left out.
    """
    folder, slash, start = incomplete.rpartition("/")
    before = f"{folder}{slash}"
    found = []
    for path in _listed(Path(before or ".").expanduser(), start):
        if path.is_dir():
            below = [f"{before}{path.name}/{row.name}" for row in _with(path, suffixes)]
            found += below or [f"{before}{path.name}/"]
        elif path.suffix.lower() in suffixes:
            found.append(f"{before}{path.name}")
    return found[:MOST_FILES]


def _listed(folder: Path, start: str) -> Iterator[Path]:
    """What lies in a folder; hidden files only if they are asked for."""
    try:
        rows = sorted(folder.iterdir())[:MOST_FILES]
    except OSError:
        return
    for path in rows:
        is_hidden = path.name.startswith(".") and not start.startswith(".")
        if path.name.startswith(start) and not is_hidden:
            yield path


def _with(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    return (path for path in _listed(folder, "") if path.suffix.lower() in suffixes)
