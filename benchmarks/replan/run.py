"""Times of `pipeplan replan` and the bytes that its plans move, against plans made from scratch."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.replan.cases import Training
from planner import Plan, solve
from planner.analysis.judge import Judge
from planner.costs.placement import specs_of
from planner.replanning.state import State

FRESH_S, SHORT_S = 60.0, 10.0
COLUMNS = (
    "training",
    "machines",
    "wall s",
    "CPU s",
    "before ms",
    "new ms",
    "bound ms",
    "repaired ms",
    "anew ms",
    "new / anew",
    "moved GiB",
    "anew moves GiB",
)
NOTES = """\
A training's plan was searched for {fresh:g} s; then something became of its machines. *wall* and
*CPU* are those of the whole command `pipeplan replan` with its defaults in a process of its own,
from its start to its end. *before* is the iteration time of the old plan, *new* that of the new
one, *bound* what `replan` proved that no plan is below. *repaired* is the time of the old stages
on their devices that are left, with the best list schedule; a dash where a stage has none left or
nothing fits. *anew* is the time of a plan searched for {fresh:g} s without the old one. *moved* is
the state (weights, optimizer, masters) that devices of the new plan do not hold under the old one,
*anew moves* the same of the plan made anew.

Searches end by the clock: their results depend on what else the machine does. The command's wall
time is more than its CPU time by what others took of the cores, less what its threads overlap.
The load average was {begin:.1f} at the start and {end:.1f} at the end, on {cores} cores.
"""


@dataclass(frozen=True)
class Row:
    """One replanning; seconds and bytes."""

    training: str
    event: str
    wall_s: float
    cpu_s: float
    before_s: float
    new_s: float
    bound_s: float
    repaired_s: float | None
    anew_s: float
    moved_bytes: int
    anew_moved_bytes: int

    def cells(self) -> list[object]:
        """Return the row's cells for the table."""
        repaired = "-" if self.repaired_s is None else f"{self.repaired_s * 1e3:.1f}"
        return [
            self.training,
            self.event,
            f"{self.wall_s:.2f}",
            f"{self.cpu_s:.2f}",
            f"{self.before_s * 1e3:.1f}",
            f"{self.new_s * 1e3:.1f}",
            f"{self.bound_s * 1e3:.1f}",
            repaired,
            f"{self.anew_s * 1e3:.1f}",
            f"{self.new_s / self.anew_s:.3f}",
            f"{self.moved_bytes / 2**30:.2f}",
            f"{self.anew_moved_bytes / 2**30:.2f}",
        ]


def rows_of(training: Training, folder: Path, fresh_s: float) -> Iterator[Row]:
    """One training's plan under every event."""
    path = folder / "old.json"
    old = solve(training.problem(), time_limit_s=fresh_s).plan
    old.save(path)
    for event, words in training.events.items():
        yield _row(training, event, old, path, words, fresh_s)


def _row(
    training: Training, event: str, old: Plan, path: Path, words: list[str], fresh_s: float
) -> Row:
    new_path = path.with_name("new.json")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    command = [sys.executable, "-m", "planner.cli", "replan", str(path), *words, "--json"]
    done = subprocess.run([*command, "-o", str(new_path)], check=True, stdout=subprocess.PIPE)
    wall_s = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    new = Plan.load(new_path)
    lost = set(old.cluster.device_names) - set(new.cluster.device_names)
    names = new.cluster.device_names
    state = State(old, set(old.cluster.device_names) - lost, names)
    anew = solve(new.problem, time_limit_s=fresh_s).plan
    moves = found["moves"]
    return Row(
        training=training.name,
        event=event,
        wall_s=wall_s,
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        before_s=old.predicted.iteration_time_s,
        new_s=found["iteration_time_s"],
        bound_s=found["lower_bound_s"],
        repaired_s=_repaired_s(old, new),
        anew_s=anew.predicted.iteration_time_s,
        moved_bytes=moves["bytes_between_devices"] + moves["bytes_from_checkpoint"],
        anew_moved_bytes=_moved_bytes(anew, state),
    )


def _repaired_s(old: Plan, new: Plan) -> float | None:
    """The old stages on what is left of their devices, in the best quick schedule."""
    judged = Judge(new.problem).judged(tuple(specs_of(old.stages)))
    return None if judged is None else judged.seconds


def _moved_bytes(plan: Plan, state: State) -> int:
    """Return the bytes that the devices of a plan do not hold yet."""
    start = Judge(plan.problem).start_of(tuple(specs_of(plan.stages)))
    assert start is not None, "a search cuts the chain of layers"
    return state.lacking_bytes(state.needed(start))
