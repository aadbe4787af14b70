"""The step of a split stage beside plain torch with the same collectives written by hand.

Usage:
    python -m benchmarks.executor.member_steps [--rounds N] [--launches N]

Two ranks of one thread, members of one tensor-parallel group, which runs all of a model. Both
forms live in the same processes and take turns of one step, forwards and backwards of all
microbatches without the optimizer, in both orders. Beside the time of a step stands the time that
the ranks' cores were at work in it, which tells more on a machine that does other things too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import ROOT
from benchmarks.executor.compare_peers import QUIET, Ratios
from benchmarks.executor.members_by_hand import LOSSES
from benchmarks.executor.plans import plan_on
from benchmarks.reporting.report import heading, table, write_table
from executor.launch.prepare import prepare
from executor.training.trainer import Trainer
from planner.costs.placed_pipeline import StageSpec
from planner.job import Job
from planner.plan.operations import Operation
from planner.plan.plan import Plan

COLUMNS = (
    *("model", "step ms, by hand", "time over that", "quartiles"),
    *("core time over that", "quartiles", "largest error of a gradient"),
)
FACTORIES = {"gpt": "models.gpt:gpt_tiny", "llama": "models.llama:llama_tiny"}
SIZES: Mapping[str, Mapping[str, int]] = {
    "gpt": {"layers": 4, "width": 256, "heads": 4, "sequence_length": 128},
    "llama": {
        "layers": 4,
        "width": 256,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 704,
        "sequence_length": 128,
    },
}
MICROBATCHES, SAMPLES, RANKS, SEED = 4, 2, 2, 11


@dataclass(frozen=True)
class StepRow:
    """One model.

    Attributes:
        model: of :data:`FACTORIES`.
        by_hand_s: median seconds of the hand-written step.
        step_time: seconds of ours over its, round by round.
        core_time: the same of the seconds that both ranks' cores were at work.
        error: relative, of the gradient that differs most.
    """

    model: str
    by_hand_s: float
    step_time: Ratios
    core_time: Ratios
    error: float

    @property
    def cells(self) -> list[str]:
        """The row's cells, in the order of :data:`COLUMNS`."""
        times = [*self.step_time.cells, *self.core_time.cells]
        return [self.model, f"{self.by_hand_s * 1e3:.0f}", *times, f"{self.error:.1e}"]


def plan_of(model: str) -> Plan:
    """Return the plan of one stage on one group, one microbatch after the other."""
    job = Job(
        samples_per_microbatch=SAMPLES,
        microbatches=MICROBATCHES,
        optimizer="sgd",
        tensor_parallel=RANKS,
        model_arguments=dict(SIZES[model]),
    )
    order = [Operation(0, kind, m) for m in range(MICROBATCHES) for kind in ("F", "B")]
    return plan_on(
        FACTORIES[model],
        job,
        (RANKS,),
        lambda problem: [StageSpec(tuple(problem.graph.layers), ("g0",))],
        lambda pipeline: {"g0": order},
    )


class ByHand:
    """A member in plain torch, with parameters of its own that begin as the executor's."""

    def __init__(self, model: str, parameters: Mapping[str, nn.Parameter], batches: Any) -> None:
        self.own = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        self._loss, self._sizes, self._batches = LOSSES[model], SIZES[model], batches

    def step(self) -> None:
        """All microbatches' forwards and backwards."""
        for parameter in self.own.values():
            parameter.grad = None
        for batch in self._batches:
            (self._loss(self.own, batch, self._sizes) / MICROBATCHES).backward()


def compare(model: str, rounds: int) -> dict[str, Any]:
    """Return seconds of both forms by round, and the largest error; all ranks call it."""
    torch.manual_seed(SEED)
    shape = (SAMPLES, SIZES[model]["sequence_length"])
    batches = [
        {name: torch.randint(256, shape) for name in ("ids", "target")} for _ in range(MICROBATCHES)
    ]
    prepared = prepare(plan_of(model), FACTORIES[model], seed=SEED)
    trainer = Trainer.of_model(prepared, lambda step, microbatch: batches[microbatch])
    by_hand = ByHand(model, prepared.parameters, batches)
    forms: dict[str, Callable[[], object]] = {
        "ours": lambda: trainer.forward_backward(1),
        "by_hand": by_hand.step,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name in list(forms)[:: -1 if number % 2 else 1]:
            seconds = _timed(forms[name])
            if number:
                found[name].append(seconds)
    return {"model": model, "seconds": found, "error": _error(trainer.parameters, by_hand.own)}


def _timed(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a step from barrier to barrier, and those that the ranks' cores were at work."""
    gc.collect()
    dist.barrier()
    start_s, busy_s = time.perf_counter(), time.process_time()
    step()
    busy = torch.tensor(time.process_time() - busy_s, dtype=torch.float64)
    dist.barrier()
    seconds = time.perf_counter() - start_s
    dist.all_reduce(busy)
    return seconds, float(busy)


def _error(ours: Mapping[str, nn.Parameter], by_hand: Mapping[str, nn.Parameter]) -> float:
    def error(name: str) -> float:
        found, expected = ours[name].grad, by_hand[name].grad
        assert found is not None
        assert expected is not None
        return float((found - expected).norm() / expected.norm())

    worst: Tensor = torch.tensor(max(map(error, by_hand)), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def measured(rounds: int, launches: int) -> list[StepRow]:
    """Return a row for each model, the rounds of all launches together."""
    found = [_answers(rounds) for _ in range(launches)]
    return [_row(answers) for answers in zip(*found, strict=True)]


def _answers(rounds: int) -> list[dict[str, Any]]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.json"
        worker = ["-m", "benchmarks.executor.member_steps", "--worker", str(path)]
        subprocess.run(
            [*launch, "--nproc-per-node", str(RANKS), *worker, "--rounds", str(rounds)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **QUIET},
            stdout=sys.stderr,
            check=True,
        )
        return json.loads(path.read_text())


def _row(answers: Sequence[Mapping[str, Any]]) -> StepRow:
    ours, by_hand = (
        [row for answer in answers for row in answer["seconds"][name]]
        for name in ("ours", "by_hand")
    )
    ratios = [
        Ratios(tuple(a[which] / b[which] for a, b in zip(ours, by_hand, strict=True)))
        for which in (0, 1)
    ]
    seconds = median(wall for wall, _ in by_hand)
    error = max(answer["error"] for answer in answers)
    return StepRow(answers[0]["model"], seconds, *ratios, error)


def work(path: Path, rounds: int) -> None:
    """Run as one of the ranks; the first writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [compare(model, rounds) for model in FACTORIES]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="of a launch")
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the table to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.worker is not None:
        work(options.worker, options.rounds)
        return 0
    rows = [row.cells for row in measured(options.rounds, options.launches)]
    title = heading(
        "A split stage beside plain torch", "python -m benchmarks.executor.member_steps"
    )
    write_table(f"{title}\n{table(COLUMNS, rows)}", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
