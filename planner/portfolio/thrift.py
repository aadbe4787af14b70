"""No more replicas than a plan has use for: the same time on fewer devices.

A bound or a search that looks for the fastest plan has no reason to leave devices out: replicas
that another stage's load hides cost nothing. Their owner would rather have them for other work.
"""

from __future__ import annotations

from dataclasses import replace

from planner.partition.chain import Partition
from planner.portfolio.search import Candidate, Search

SHARE = 0.02
"""Of the whole time, that this may take beyond its end."""


def leave_out_replicas(search: Search) -> None:
    """Drop replicas of the best plan's stages, the idlest first, while it takes no longer."""
    if search.best is None or search.clock.is_stopped:
        return
    stop_s = max(search.clock.elapsed_s, search.limit_s) + SHARE * search.limit_s
    for number in range(len(search.best.partition)):
        _leave_out(search, number, stop_s)


def _leave_out(search: Search, number: int, stop_s: float) -> None:
    """Halve the range of how many replicas a stage needs."""
    best = search.best
    assert best is not None
    least, most = 1, len(best.partition[number].devices)
    while least < most and search.clock.elapsed_s + search.longest_s < stop_s:
        middle = (least + most) // 2
        partition = search.optimiser.representative(_with_busiest(best, number, middle))
        search.consider(partition)
        if search.best is not None and search.best.partition == partition:
            most = middle
        else:
            least = middle + 1


def _with_busiest(candidate: Candidate, number: int, count: int) -> Partition:
    """The candidate's stages, one of them on so many of its devices."""
    busy_s = candidate.schedule.timeline.busy_s
    stage = candidate.partition[number]
    busiest = sorted(stage.devices, key=lambda device: -busy_s[device])[:count]
    kept = tuple(device for device in stage.devices if device in busiest)
    changed = list(candidate.partition)
    changed[number] = replace(stage, devices=kept)
    return tuple(changed)
