"""Shell completion of options and files: quick, and silent on errors.

Each function takes what was typed so far and gives what may stand there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ALL, CHOOSE = "all", "choose"
"""Words in place of the name of a synchronisation strategy: all of them; the one that suits."""
MOST_FILES = 500
"""A shell shows no more; a folder of a sweep may hold thousands."""


def plans(incomplete: str) -> list[str]:
    """Return files that may hold a plan, a graph or other JSON."""
    return _files(incomplete, ".json")


def clusters(incomplete: str) -> list[str]:
    """Return files that may hold a cluster or a job."""
    return _files(incomplete, ".toml", ".json")


def artifacts(incomplete: str) -> list[str]:
    """Return files of any kind that Pipeplan writes or reads."""
    return _files(incomplete, ".json", ".toml")


def device_types(incomplete: str) -> list[str]:
    """Return the presets of devices."""
    from planner.cluster.presets import DEVICES

    return _beginning(DEVICES, incomplete)


def link_types(incomplete: str) -> list[str]:
    """Return the presets of links."""
    from planner.cluster.presets import LINKS

    return _beginning(LINKS, incomplete)


def export_targets(incomplete: str) -> list[str]:
    """Return the tools that plans can be exported to."""
    from planner.interop.export.exported import TARGETS

    return _beginning(TARGETS, incomplete)


def runtimes(incomplete: str) -> list[str]:
    """Return the runtimes that plans can be made for."""
    from planner.plan.runtime_rules import RULES

    return _beginning(RULES, incomplete)


def import_formats(incomplete: str) -> list[str]:
    """Return the kinds of files that can be imported."""
    from planner.interop.importing.formats import AUTO, CLUSTER_FORMATS, FORMATS

    return _beginning([AUTO, *FORMATS, *CLUSTER_FORMATS], incomplete)


def planners(incomplete: str) -> list[str]:
    """Return the names of baselines that may follow the last comma."""
    from planner.search.partition.baselines import BASELINES

    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    left = [name for name in BASELINES if name not in taken]
    return [f"{before}{comma}{name}" for name in _beginning(left, last)]


def strategies(incomplete: str) -> list[str]:
    """Return the synchronisation strategies and the word that lets Pipeplan choose."""
    from planner.sync.strategies import OPTIONS

    return _beginning([*OPTIONS, CHOOSE], incomplete)


def simulated_strategies(incomplete: str) -> list[str]:
    """Return the strategies and the word for all of them."""
    return [*strategies(incomplete), *_beginning([ALL], incomplete)]


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Return a function that completes one of a few words."""

    def complete(incomplete: str) -> list[str]:
        return _beginning(words, incomplete)

    return complete


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _files(incomplete: str, *suffixes: str) -> list[str]:
    """Return files with a suffix in the typed folder and one folder below.

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
    """Yield the entries of a folder; hidden files only if the user typed a dot."""
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
