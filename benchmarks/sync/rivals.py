"""Strategies as their papers have them, beside ours: HetPipe's waves, Ripples' own filter."""

from __future__ import annotations

from benchmarks.sync.claims import RUN_COLUMNS, Outcome, run_lines, run_rows
from benchmarks.sync.settings import ASYNC, DRAWN, OVERLAPPED, PLAIN, SEMI_BEHIND, SERVER
from benchmarks.sync.simulated import Simulated, flat_world, simulate_all

DISTANCES = (0, 1, 4, 16)
PUBLISHED_FILTER = f"{DRAWN}:filter_between=initiator"
STRATEGIES = (
    *(PLAIN, OVERLAPPED, SERVER, ASYNC),
    *(f"wave_synchronous:distance={distance}" for distance in DISTANCES),
    *(DRAWN, PUBLISHED_FILTER, SEMI_BEHIND),
)
WORKERS, COMMUNICATION = 16, 0.02
SLOW = {
    "steady": "steady",
    "random_sleeps": "sleep:0.1:0.3",
    "one_4x_slow": "slow:0x4",
    "a_node_4x_slow": "slow:0x4,1x4,2x4,3x4",
}


def rivals_section(seeds: int, *, short: bool) -> Outcome:
    """Waves by their distance, and both filters, among sixteen workers in four nodes.

    Args:
        seeds: how many.
        short: two settings instead of four.
    """
    names = ("random_sleeps", "a_node_4x_slow") if short else tuple(SLOW)
    world = flat_world(WORKERS, COMMUNICATION, per_node=4)
    settings = [Simulated(f"sixteen_{name}", name, world, SLOW[name]) for name in names]
    found = simulate_all(settings, STRATEGIES, seeds)
    rows = [row for name, runs in found.items() for row in run_rows(name, runs)]
    lines = [line for name, runs in found.items() for line in run_lines(name, runs, is_real=False)]
    return Outcome((), RUN_COLUMNS, rows, lines)
