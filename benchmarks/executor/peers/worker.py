"""One rank of the comparison: ``torchrun -m benchmarks.executor.peers.worker REQUEST ANSWERS``.

Reads the cases, the rounds and the steps of a round; rank 0 adds a JSON line a case to the answers.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.executor.peers.cases import FACTORIES, Case, plan_of
from benchmarks.executor.peers.memory import held_memory
from benchmarks.executor.peers.torch_runtime import CutStage, TorchRuntime, hand_split, order_of
from executor.launch.prepare import Prepared, prepare
from executor.training.trainer import Trainer
from planner.plan.plan import Plan

SEED = 11


class _Runtime(Protocol):
    def step(self) -> float: ...

    def gradients(self) -> dict[str, Tensor]: ...


class OurRuntime:
    """One rank of the executor, without its optimizer."""

    def __init__(self, prepared: Prepared, batch: Mapping[str, Tensor]) -> None:
        count = prepared.plan.microbatches
        parts = {name: entry.chunk(count) for name, entry in batch.items()}
        microbatches = [{name: part[k] for name, part in parts.items()} for k in range(count)]
        self.trainer = Trainer.of_model(prepared, lambda step, microbatch: microbatches[microbatch])

    def step(self) -> float:
        """All microbatches' forwards and backwards; this rank's share of the mean loss."""
        return float(self.trainer.forward_backward(1))

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients by the model's own parameter names."""
        named = self.trainer.parameters.items()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}


class Comparison:
    """One case on this rank."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rank = dist.get_rank()
        torch.manual_seed(SEED)
        shape = (case.samples * case.microbatches, case.arguments["sequence_length"])
        self.batch = {name: torch.randint(256, shape) for name in ("ids", "target")}
        self.plan: Plan = plan_of(case, order_of(case, self._by_hand()))
        self.make: dict[str, Callable[[], _Runtime]] = {
            "executor": self._ours,
            "torch": self._by_hand,
            "torch, our cuts": self._cut,
        }

    def _prepare(self) -> Prepared:
        return prepare(self.plan, FACTORIES[self.case.model], seed=SEED)

    def _ours(self) -> _Runtime:
        return OurRuntime(self._prepare(), self.batch)

    def _by_hand(self) -> TorchRuntime:
        modules = hand_split(self.case, self.rank, SEED)
        return TorchRuntime(self.case, self.rank, modules, self.batch, makes_loss=False)

    def _cut(self) -> _Runtime:
        modules = {stage.index: CutStage(stage) for stage in self._prepare().stages}
        return TorchRuntime(self.case, self.rank, modules, self.batch, makes_loss=True)

    def run(self, rounds: int, steps: int) -> dict[str, Any]:
        """Return the results that rank 0 writes for the case."""
        memory = {name: asdict(held_memory(make)) for name, make in self.make.items()}
        runtimes = {name: make() for name, make in self.make.items()}
        agreement = self._agreement(runtimes)
        times = self._times(runtimes, rounds, steps)
        seconds = {name: [wall for wall, _ in found] for name, found in times.items()}
        busy = {name: [cores for _, cores in found] for name, found in times.items()}
        ranks: list[Any] = [None] * self.case.ranks
        dist.all_gather_object(ranks, memory)
        orders = list(self.plan.orders.values())
        return {
            **agreement,
            "seconds": seconds,
            "busy_seconds": busy,
            "memory": ranks,
            "orders": orders,
        }

    def _agreement(self, runtimes: Mapping[str, _Runtime]) -> dict[str, Any]:
        """Every runtime's loss, and the largest error of a gradient against the executor's."""
        losses, errors = {}, {}
        found = {}
        for name, runtime in runtimes.items():
            losses[name] = _over_ranks(runtime.step(), dist.ReduceOp.SUM)
            found[name] = runtime.gradients()
        for name, gradients in found.items():
            worst = _largest_error(_plain(found["executor"]), _plain(gradients))
            errors[name] = _over_ranks(worst, dist.ReduceOp.MAX)
        return {"losses": losses, "errors": errors}

    def _times(
        self, runtimes: Mapping[str, _Runtime], rounds: int, steps: int
    ) -> dict[str, list[tuple[float, float]]]:
        """Return step times of :func:`_timed`: each runtime in turn, in both orders."""
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in runtimes}
        for number in range(rounds + 1):
            turn = list(runtimes)[:: -1 if number % 2 else 1]
            for name in turn:
                times = _timed(runtimes[name].step, steps)
                if number > 0:
                    found[name].append(times)
        return found


def _plain(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the names of the whole model; a cut stage's module is one level deeper."""
    return {name.removeprefix("piece."): gradient for name, gradient in gradients.items()}


def _largest_error(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    assert expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())
    pairs = [(expected[name], found[name]) for name in expected]
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def _over_ranks(value: float, operation: Any) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, operation)
    return float(total)


def _timed(step: Callable[[], float], steps: int) -> tuple[float, float]:
    """Seconds a step from barrier to barrier, and seconds that the ranks' cores were at work."""
    gc.collect()
    dist.barrier()
    start, start_busy = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    busy = time.process_time() - start_busy
    dist.barrier()
    seconds = time.perf_counter() - start
    return seconds / steps, _over_ranks(busy, dist.ReduceOp.SUM) / steps


def main(request: Path, answers: Path) -> None:
    """Run every case of the request."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asked = json.loads(request.read_text())
    for data in asked["cases"]:
        found = Comparison(Case(**data)).run(asked["rounds"], asked["steps"])
        if dist.get_rank() == 0:
            with answers.open("a") as file:
                file.write(json.dumps({"case": data, **found}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
