"""The processes that measure: ``python -m benchmarks.testbed.probe FOLDER`` on every rank.

They read ``scenarios.json`` of the folder and write ``RANK.json``. All share one clock, that of
the machine, so that a transfer is timed from its sender's call to its receiver's return.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.testbed.scenario import Move, Policy, Scenario, scenario_of

AHEAD_S = 0.01
"""Seconds from the moment all are ready to the common start."""
SPIN_S = 0.0005
"""Before the start a rank looks at the clock instead of sleeping."""

SETTLE_S = 1.0
"""After all have connected; the first to come would be measured while the others still load."""
PATIENCE_S = 60
"""A message that takes longer has failed."""


def main() -> None:
    """Run every scenario this rank takes part in."""
    folder = Path(sys.argv[1])
    data = json.loads((folder / "scenarios.json").read_text())
    scenarios = [scenario_of(item) for item in data]
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    rank = dist.get_rank()
    dist.barrier()
    time.sleep(SETTLE_S)
    probe = Probe(rank)
    for scenario in scenarios:
        probe.make_group(scenario.members)
    found = [
        [probe.once(scenario, f"{number}/{repeat}") for repeat in range(-1, scenario.repeats)][1:]
        if rank in scenario.ranks
        else probe.pass_by(scenario, number)
        for number, scenario in enumerate(scenarios)
    ]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Probe:
    """One rank's part in scenarios.

    Args:
        rank: its own.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # Over the unshaped network: nothing of it is in the way of what is measured.
        self.store = dist.distributed_c10d._get_default_store()
        self.groups: dict[tuple[int, ...], Any] = {}

    def pass_by(self, scenario: Scenario, number: int) -> list[Any]:
        """Let the others begin, without waiting for them."""
        for repeat in range(-1, scenario.repeats):
            self._arrive(f"{number}/{repeat}")
        return []

    def once(self, scenario: Scenario, name: str) -> dict[str, Any]:
        """Seconds on the machine's clock: when this rank began, and ends by place."""
        if scenario.members:
            return self._all_reduce(scenario, name)
        ends: dict[int, float] = {}
        waiting = [
            threading.Thread(target=self._receive, args=(place, move, scenario.policy, ends))
            for place, move in enumerate(scenario.moves)
            if move.target == self.rank
        ]
        for thread in waiting:
            thread.start()
        time.sleep(AHEAD_S)  # Until the receives are posted.
        begin = self._start(name)
        works = self._send_all(scenario)
        for thread in waiting:
            thread.join()
        for work in works:
            work.wait()
        is_source = any(move.source == self.rank for move in scenario.moves)
        return {"begin_s": begin if is_source else None, "ends_s": ends}

    def _receive(self, place: int, move: Move, policy: Policy, ends: dict[int, float]) -> None:
        tensor = torch.empty(move.bytes_, dtype=torch.uint8)
        dist.recv(tensor, move.source, tag=2 * place)
        ends[place] = time.monotonic()
        if policy == "received":
            dist.send(torch.zeros(1), move.source, tag=2 * place + 1)

    def _send_all(self, scenario: Scenario) -> list[Any]:
        """Send by the scenario's policy, and return what is still to be waited for."""
        own = [(n, move) for n, move in enumerate(scenario.moves) if move.source == self.rank]
        tensors = [torch.zeros(move.bytes_, dtype=torch.uint8) for _, move in own]
        works = []
        for (place, move), tensor in zip(own, tensors, strict=True):
            work = dist.isend(tensor, move.target, tag=2 * place)
            assert work is not None, "this rank belongs to the group"
            if scenario.policy == "sent":
                work.wait()  # Once and no more: gloo would wait for another message.
                continue
            works.append(work)
            if scenario.policy == "received":
                dist.recv(torch.empty(1), move.target, tag=2 * place + 1)
        return works

    def _all_reduce(self, scenario: Scenario, name: str) -> dict[str, Any]:
        group = self.groups[scenario.members]
        tensor = torch.zeros(scenario.bytes_ // 4)
        begin = self._start(name)
        dist.all_reduce(tensor, group=group)
        place = scenario.members.index(self.rank)
        return {"begin_s": begin, "ends_s": {place: time.monotonic()}}

    def make_group(self, members: tuple[int, ...]) -> None:
        """All ranks make it, members or not."""
        if members and members not in self.groups:
            self.groups[members] = dist.new_group(list(members))

    def _arrive(self, name: str) -> None:
        if self.store.add(f"ready/{name}", 1) == dist.get_world_size():
            self.store.set(f"start/{name}", repr(time.monotonic() + AHEAD_S))

    def _start(self, name: str) -> float:
        """Return at the common start, and say when that was."""
        self._arrive(name)
        start = float(self.store.get(f"start/{name}"))
        time.sleep(max(0.0, start - time.monotonic() - SPIN_S))
        while time.monotonic() < start:
            pass
        return time.monotonic()


if __name__ == "__main__":
    main()
