"""Files of every format with bytes and values changed: refused with named problems, or read.

Reading one may raise nothing but a ``PipeplanError``, and takes at most so many seconds of a
processor and so much memory more than there was before. Plans that are read are verified as well.
Works on Linux alone, which forgets a process's largest size when it is told to.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builders import ROOT

from executor.checkpoint.manifest import Manifest
from executor.launch.config import TrainingConfig
from planner import load_plan
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.interop.imported import import_cluster
from planner.interop.machines import ImportOptions
from planner.job import Job
from planner.measured.sync_trace import SyncTrace
from planner.measured.timeline import MeasuredTimeline
from planner.model.layer_graph import LayerGraph
from planner.model.measured_costs import Costs
from planner.plan.moves import Moves
from planner.plan.plan import Plan
from planner.plan.runtime_rules import RuntimeRules
from planner.plan.sweep_index import SweepIndex
from planner.verification import verify

FOLDER = ROOT / "tests" / "data" / "formats"
MOST_S, MOST_MB = 5.0, 500.0
TOPOLOGY = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV12\tPXB\t0-31\t0\tN/A\nGPU1\tNV12\t X \tSYS\t32-63\t1\tN/A\n"
    "NIC0\tPXB\tSYS\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
NCCL = (
    "# nThread 1 nGpus 2 minBytes 8 maxBytes 1048576\n"
    "#  Rank  0 Group  0 Pid 1 on n0 device  0 [0x07] NVIDIA A100-SXM4-80GB\n"
    "#  Rank  1 Group  0 Pid 1 on n0 device  1 [0x0f] NVIDIA A100-SXM4-80GB\n"
    "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"
    + "".join(
        f"{8 << k} {2 << k} float sum -1 {10 + (8 << k) / 2e4:.2f} 1.0 1.0 0\n" for k in range(18)
    )
)


def _plan(path: Path) -> None:
    verify(Plan.load(path))
    load_plan(path)


def _imported(path: Path) -> None:
    import_cluster(path, options=ImportOptions(device_type="A100-80GB"))


LOADERS: dict[str, Callable[[Path], object]] = {
    "graph": LayerGraph.load,
    "cluster": Cluster.load,
    "job": Job.load,
    "runtime": RuntimeRules.load,
    "train": TrainingConfig.load,
    "checkpoint": Manifest.load,
    "timeline": MeasuredTimeline.load,
    "costs": Costs.load,
    "sync-trace": SyncTrace.load,
    "sweep": SweepIndex.load,
    "moves": Moves.load,
}
"""What reads each kind of file but plans."""
READERS = {"plan": _plan, **LOADERS, "imported": _imported}
"""What reads files, by the beginning of their names."""


@dataclass
class Outcome:
    """What became of all files.

    Attributes:
        counts: how many were refused or read.
        faults: what should not have happened, a text each.
        most_s: the longest time of a file, in seconds of a processor.
        most_more_mb: the most that reading a file added to this process's resident size.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    most_s: float = 0.0
    most_more_mb: float = 0.0


def fuzzed(number: int, seed: int = 0) -> Outcome:
    """Read so many changed files."""
    rng, outcome = random.Random(seed), Outcome()
    sources = list(_sources())
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(number):
            name, suffix, text = rng.choice(sources)
            path = Path(folder) / f"changed{suffix}"
            path.write_bytes(changed(text, rng))
            _read(name, path, outcome)
    return outcome


def _sources() -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the suffix and the text of files that are right."""
    for path in sorted(FOLDER.iterdir()):
        if found := re.match(r"([a-z-]+)-\d", path.name):
            yield found[1], path.suffix, path.read_text()
    yield "imported", ".txt", TOPOLOGY
    yield "imported", ".txt", NCCL


def _read(name: str, path: Path, outcome: Outcome) -> None:
    began_s, before_mb = time.process_time(), _now_mb()
    try:
        READERS[name](path)
        outcome.counts["read"] += 1
    except PipeplanError:
        outcome.counts["refused"] += 1
    except Exception:
        outcome.counts["failed"] += 1
        outcome.faults.append(f"{name}: {traceback.format_exc()}")
    taken_s, more_mb = time.process_time() - began_s, _most_mb() - before_mb
    outcome.most_s = max(outcome.most_s, taken_s)
    outcome.most_more_mb = max(outcome.most_more_mb, more_mb)
    if taken_s > MOST_S or more_mb > MOST_MB:
        costs = f"{taken_s:.1f} s, {more_mb:.0f} MB"
        outcome.faults.append(f"{name}: {costs} for {path.read_bytes()[:200]!r}")


# --- changes --------------------------------------------------------------------------------------


def changed(text: str, rng: random.Random) -> bytes:
    """Return a file with one to three changes."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        text = rng.choice(CHANGES)(text, rng)
    data = bytearray(text.encode(errors="surrogatepass"))
    if data and rng.random() < 0.2:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _cut(text: str, rng: random.Random) -> str:
    first = rng.randrange(len(text) + 1)
    return text[:first] + text[first + rng.choice([1, 10, 1000, len(text)]) :]


def _repeat(text: str, rng: random.Random) -> str:
    first = rng.randrange(len(text) + 1)
    part = text[first : first + rng.choice([1, 20, 400])]
    return text[:first] + part * rng.choice([2, 50, 5000]) + text[first:]


def _number(text: str, rng: random.Random) -> str:
    values = ["-1", "0", "1e400", "NaN", "-Infinity", "1e308", "9" * 400, str(2**63), "0.5", "null"]
    return _replaced(r"-?\d+(\.\d+)?", text, rng, rng.choice(values))


def _near(text: str, rng: random.Random) -> str:
    """Change a number a little: files that are wrong in this alone go furthest."""
    found = list(re.finditer(r"-?\d+(\.\d+)?", text[: 10**5]))
    if not found:
        return text
    value = rng.choice(found)[0]
    factor = rng.choice([0.5, 1.001, 2, 1000])
    changed = [str(int(value) + rng.choice([-1, 1]))] if "." not in value else []
    return _replaced(
        re.escape(value), text, rng, rng.choice([*changed, f"{float(value) * factor:g}"])
    )


def _word(text: str, rng: random.Random) -> str:
    values = ['"\x1b[2J"', '"' + "x" * 10**5 + '"', '"\\ud800"', "[]", "{}", "[" * 3000, '""']
    return _replaced(r'"[^"]*"', text, rng, rng.choice(values))


def _exchanged(text: str, rng: random.Random) -> str:
    words = re.findall(r'"[^"]*"|-?\d+(?:\.\d+)?', text[: 10**5]) or [""]
    return _replaced(r'"[^"]*"|-?\d+(\.\d+)?', text, rng, rng.choice(words))


def _many(text: str, rng: random.Random) -> str:
    """Make a list of a JSON file very long."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    lists = [found for found in _lists(data) if found]
    if lists:
        found = rng.choice(lists)
        found *= rng.choice([2, 10**3, 10**5 // len(found) + 1])
    return json.dumps(data)


def _lists(data: Any) -> Iterator[list]:
    if isinstance(data, dict | list):
        if isinstance(data, list):
            yield data
        for value in data.values() if isinstance(data, dict) else data:
            yield from _lists(value)


def _replaced(pattern: str, text: str, rng: random.Random, value: str) -> str:
    found = list(re.finditer(pattern, text[: 10**5]))
    if not found:
        return text
    place = rng.choice(found)
    return text[: place.start()] + value + text[place.end() :]


CHANGES = (_cut, _repeat, _number, _number, _near, _near, _near, _word, _exchanged, _many)


def _now_mb() -> float:
    """Return this process's resident size, which is its largest one from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _most_mb()


def _most_mb() -> float:
    (found,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) / 1024
