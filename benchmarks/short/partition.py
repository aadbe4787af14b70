"""Partitions in three minutes: public optima, random clusters, a part of the comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import partition_rows as full
from benchmarks.claims import Claim, Details, Entry, LeftOut, details, met, without_data
from planner import PipeplanError

OPTIMA = "dnn-partitioning's optima: the authors' exact DP, one proved elsewhere (Tarnawski et al.)"
CLASSIC = "even splits, PipeDream, DAPPLE, AutoPipe: the best of them; the bar is our own"
SPP = "SPP (INFOCOM 2022), near-optimal by its authors; the bar is our own"
EVERY = "even splits, PipeDream, DAPPLE, AutoPipe, SPP: none may be faster"
OURS = "our own bar: a bound that we prove"
STRIDE = 11
"""Of the comparisons with classic planners: prime to the number of clusters, so that all kinds of
clusters and most profiles come by."""
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
_SAID = (
    "public instances: the best partition is found and proved",
    "time of the best classic planner but SPP over ours, geometric mean",
    "time of SPP's plan over ours, geometric mean",
    "plans that are not slower than any classic planner's",
)


def entries(data: Path | None, workers: int) -> Iterator[Entry]:
    """Claims and tables.

    Args:
        data: folder of the public instances; None: what needs them is told as not run.
        workers: of each search.
    """
    yield from _loads(data, workers)
    yield from _matrices(workers)
    yield from _planners(data)
    yield LeftOut(text="1,024 GPUs")


def _loads(data: Path | None, workers: int) -> Iterator[Entry]:
    section = full.SECTIONS["loads"]
    if data is None:
        yield without_data(_SAID[0], OPTIMA)
        return
    rows = section.run(data, workers)
    if not rows:
        raise PipeplanError(f"--data {data}: no *.json under dnn_partitioning; give its parent")
    reached = sum(row[-1] == "reached" for row in rows)
    yield met(_SAID[0], OPTIMA, reached, len(rows), regime="30 s contiguous, 60 s free")
    yield details(section.title, section.columns, rows)


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


def _planners(data: Path | None) -> Iterator[Entry]:
    if data is None:
        yield from (
            without_data(said, source)
            for said, source in zip(_SAID[1:], (CLASSIC, SPP, EVERY), strict=True)
        )
        return
    every = full.planner_cases(data)
    if not every:
        raise PipeplanError(f"--data {data}: no *.txt in dapple, pipedream; give their parent")
    cases = every[::STRIDE]
    known = [(case, pair) for case, pair in zip(cases, full.ratios(cases), strict=True) if pair]
    yield from _planner_claims([pair for _, pair in known])
    yield _planner_table(known)
    yield LeftOut(text=f"{len(every) - len(cases)} of {len(every)} comparisons (every {STRIDE}th)")


def _planner_claims(pairs: list[tuple[float, float]]) -> Iterator[Claim]:
    regime = (
        f"{len(pairs)} pairs of a public profile and a cluster, 32 microbatches, "
        f"{full.COMPARE_LIMIT_S:g} s each, one simulator"
    )
    bars = (full.CLASSIC_BAR, full.SPP_BAR)
    for place, (source, bar) in enumerate(zip((CLASSIC, SPP), bars, strict=True)):
        mean = full.mean([pair[place] for pair in pairs])
        yield Claim(claim=_SAID[1 + place], source=source, regime=regime, bar=bar, figure=mean)
    slower = sum(min(pair) < 1 - 1e-9 for pair in pairs)
    yield met(_SAID[3], EVERY, len(pairs) - slower, len(pairs), regime=regime)


def _planner_table(known: list[tuple[tuple[str, str | int], tuple[float, float]]]) -> Details:
    rows = []
    for (profile, cluster), (best, spp) in known:
        name = f"random {cluster}" if isinstance(cluster, int) else Path(cluster).stem
        rows.append((Path(profile).stem, name, f"{best:.3f}", f"{spp:.3f}"))
    columns = ("profile", "cluster", "best but SPP / ours", "SPP / ours")
    return details("Against the classic planners", columns, rows)
