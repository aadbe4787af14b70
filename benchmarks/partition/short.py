"""Partitions in two minutes: random clusters."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.partition import rows as full
from benchmarks.reporting.claims import Entry, LeftOut, details, met

OURS = "our own bar: a bound that we prove"
MATRICES = (
    "8 devices, random matrix, 1 type, 24 layers (transformer)",
    "8 devices, random matrix, 2 types, 200 layers (cnn)",
    "6 devices, random matrix, 1 type, replication, 24 layers (transformer)",
    "8 devices, random matrix, 2 types, replication, 48 layers (transformer)",
    "16 devices, random matrix, 1 type, 96 layers (transformer)",
    "16 devices, random matrix, 2 types, 96 layers (cnn)",
    "16 devices, random matrix, 2 types, replication, 96 layers (transformer)",
    "64 devices, two levels, 1 type, 200 layers (transformer)",
    "64 devices, two levels, 3 types, 200 layers (cnn)",
)


def entries(workers: int) -> Iterator[Entry]:
    """Claims and tables.

    Args:
        workers: of each search.
    """
    yield from _matrices(workers)
    yield LeftOut(text="1,024 GPUs")


def _matrices(workers: int) -> Iterator[Entry]:
    cases = {case.name: case for case in full.matrix_cases()}
    section = full.SECTIONS["matrices"]
    rows = full.solve_matrices([cases[name] for name in MATRICES], workers)
    for told, wanted in (
        ("random clusters: partitions proved optimal in time", True),
        ("random clusters of more devices: gaps within 1 to 8 % in time", False),
    ):
        mine = [row for row in rows if (row[4] == "optimal") == wanted]
        reached = sum(row[-1] == "reached" for row in mine)
        yield met(told, OURS, reached, len(mine), regime="instances, bars and limits below")
    yield details(section.title, section.columns, rows)
    yield LeftOut(text=f"{len(cases) - len(MATRICES)} of {len(cases)} random clusters")
