"""Given stages whose schedule is asked for, with the best figures that are known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.plans.drawn import Data
from benchmarks.plans.instances import Instance, chunks, uneven, zero_bubble, zero_bubble_rows


def cases(published: Path | None) -> Iterator[tuple[str, Data, float]]:
    """Yield names, problems with ``stages`` and ``split``, and the best iteration time known.

    The figures are those of annealing over orders and of CP-SAT's windows, 10 CPU s each; of the
    public instances of a data folder those of the zero-bubble authors' search (Qi et al. 2024).
    """
    for instance, whole, known_us in (
        (uneven(8, 32, "1f1b", 1, whole=True), True, 147_190),
        (uneven(8, 32, "uniform", 1, whole=True, send_ms=2), True, 218_637),
        (uneven(8, 32, "uniform", 1, send_ms=2), False, 182_251),
        (uneven(8, 32, "double", 1, send_ms=2), False, 134_621),
        (uneven(16, 64, "uniform", 1, whole=True), True, 299_180),
        (chunks(8, 16, "v", 1, whole=True), True, 127_340),
        (chunks(8, 16, "v", 1, whole=True, tapered=True), True, 146_439),
        (chunks(8, 16, "interleaved", 1), False, 120_186),
        (chunks(8, 32, "v", 1, whole=True, tapered=True), True, 255_767),
        (chunks(8, 32, "interleaved", 1), False, 233_524),
        (_tight(uneven(8, 32, "1f1b", 3, send_ms=0.3), 3, 0.5), False, 316_293),
        (_tight(uneven(8, 32, "1f1b", 4, whole=True, send_ms=1.0), 4, 0.5, True), True, 574_720),
        (_tight(uneven(12, 24, "1f1b", 5, send_ms=0.5), 5, 0.4), False, 346_789),
        (_tight(chunks(4, 16, "v", 6), 6, 0.3), False, 210_845),
        (_tight(chunks(4, 16, "v", 7, whole=True), 7, 0.3, True), True, 250_833),
    ):
        data = instance.data()
        yield instance.name, {**data, "split": not whole}, known_us * 1e-6
    if published is None:
        return
    for row in zero_bubble_rows(published / "zero_bubble_instances.json"):
        for cap in (1, 2):
            instance = zero_bubble(row, cap)
            known_us = row[f"zero_bubble_heuristic_cap_{cap}p"]["makespan"]
            name = f"zero bubble, {instance.name}, {cap} x stages in flight"
            yield name, {**instance.data(), "split": True}, known_us * 1e-6


def _tight(instance: Instance, seed: int, share: float, whole: bool = False) -> Instance:
    """Return an instance with unequal stashes and about a share of the memory 1F1B needs."""
    rng = random.Random(seed + 99)
    count, devices = len(instance.forward_s), len(instance.caps)
    stash = [rng.choice([2, 3, 4, 6]) for _ in range(count)]
    caps = []
    for device in range(devices):
        held = [stage for stage in range(count) if instance.device[stage] == device]
        need = sum(stash[stage] * (count - stage) for stage in held)
        least = sum(stash[stage] for stage in held)
        caps.append(max(least, int(need * share * rng.uniform(0.8, 1.2))))
    return replace(
        instance,
        name=f"{instance.name}, unequal stashes at {share:.0%}",
        stash=stash,
        weight_stash=stash if whole else [max(1, units // 2) for units in stash],
        caps=caps,
    )
