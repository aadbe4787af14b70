"""Profiles of PipeDream and DAPPLE, from file to artifacts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from planner.artifacts.document import read_text
from planner.artifacts.job import Job
from planner.importing.imported import Imported
from planner.importing.options import MOST_SAMPLES, ImportOptions
from planner.importing.profile_graph import PRECISION, ProfileGraph
from planner.importing.profile_text import Profile, parse_profile
from planner.units import plural

_BATCH = re.compile(r"(?:^|[-_.])pbs[-_]?(\d{1,9})(?=[-_.]|$)", re.IGNORECASE)
_NODE_LINE = re.compile(r"^\s*\S+ -- .* -- .*forward_compute_time=", re.MULTILINE)
_ROUND_BYTES = 1000


def read_profile(path: Path, options: ImportOptions) -> Imported:
    """Read a profile of either tool; the syntax is the same.

    Raises:
        PipeplanError: naming line, field, value and remedy of all that cannot be read.
    """
    profile = parse_profile(read_text(path), str(path))
    draft = ProfileGraph(profile, options)
    samples, source = _samples(path, options)
    name = _model_name(path)
    return Imported(
        graph=draft.layer_graph(name, samples),
        cluster=None,
        job=Job(name=name, samples_per_microbatch=samples, precision=PRECISION),
        notes=(source, *profile.notes, *draft.notes(), *_assumptions(profile, options)),
    )


def looks_like_profile(head: str) -> bool:
    """Whether the beginning of a file has a node line."""
    return _NODE_LINE.search(head) is not None


def profile_batch(path: Path) -> int | None:
    """The batch size that the name of a DAPPLE profile holds as ``pbs-N``; None if it has none."""
    match = _BATCH.search(path.stem)
    return int(match[1]) if match and 1 <= int(match[1]) <= MOST_SAMPLES else None


def _samples(path: Path, options: ImportOptions) -> tuple[int, str]:
    """Samples of a microbatch and where the figure comes from."""
    told, named = options.samples_per_microbatch, profile_batch(path)
    if told is not None and named not in (None, told):
        return (
            told,
            f"{plural(told, 'sample')} a microbatch as you say; the file's name says {named}",
        )
    if told is not None:
        return told, f"{plural(told, 'sample')} a microbatch, as you say"
    if named is not None:
        return named, f"{plural(named, 'sample')} a microbatch, from the file's name (pbs-{named})"
    return 1, (
        "the file does not say of how many samples its batch is; it counts as one sample, "
        "--samples-per-microbatch says otherwise"
    )


def _model_name(path: Path) -> str:
    """The file's name; PipeDream calls every file ``graph.txt`` and the folder by the model."""
    name = path.resolve().parent.name if path.stem == "graph" else path.stem
    return name[:100] or path.stem


def _assumptions(profile: Profile, options: ImportOptions) -> Iterator[str]:
    yield (
        f"times are those of {options.device_type} for the whole batch; other device types scale "
        f"by their {PRECISION} peak times efficiency"
    )
    yield (
        "backward is split half and half into input and weight gradient where a layer has both; "
        "a layer keeps its output for its backward"
    )
    sizes = [size for node in profile.nodes.values() for size in node.activation_bytes if size]
    if sizes and not any(size % _ROUND_BYTES for size in sizes):
        yield (
            f"every activation size is a multiple of {_ROUND_BYTES}: read as bytes, but they may "
            "be rounded, or be MiB times a million (up to 4.9% too small)"
        )
