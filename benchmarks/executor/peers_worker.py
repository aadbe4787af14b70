"""One rank of the comparison with torch's pipelines, started by :mod:`benchmarks.executor.peers`.

Usage: ``torchrun -m benchmarks.executor.peers_worker ANSWERS ROUNDS SCHEDULE …``; rank 0 adds a
JSON line a schedule to the answers.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional

from benchmarks.executor.memory import peak_bytes
from benchmarks.executor.plans import star
from executor.launch.prepare import prepare
from executor.training.trainer import Trainer
from models.gpt import GPT, gpt_tiny
from planner import Job, Problem, trace
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.plan.operations import Operation, parse_operation
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource

SEED, LAYERS, MICROBATCHES = 11, 8, 8
FACTORY = "benchmarks.executor.peers_worker:untied_gpt"
ARGUMENTS = {"layers": LAYERS, "width": 256, "heads": 4, "sequence_length": 128}
"""Operations of 5 to 20 ms on one core of a few years ago."""
LENGTH, WIDTH, VOCABULARY = 128, 256, 256
CPU = torch.device("cpu")
MULTIPLE = {
    "interleaved 1f1b": ScheduleInterleaved1F1B,
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
"""Torch's schedules of several stages a rank; 1F1B has one."""
Batch = Mapping[str, Tensor]


def untied_gpt(**arguments: Any) -> GPT:
    """Return a GPT whose head has weights of its own: torch's runtime sums no tied gradients."""
    model = gpt_tiny(**arguments)
    model.lm_head.weight = nn.Parameter(model.wte.weight.detach().clone())
    return model


def main(answers: Path, rounds: int, schedules: Sequence[str]) -> None:
    """Run every schedule."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for schedule in schedules:
        found = _compared(schedule, rounds)
        if dist.get_rank() == 0:
            with answers.open("a") as file:
                file.write(json.dumps({"schedule": schedule, **found}) + "\n")
    dist.destroy_process_group()


def _compared(schedule: str, rounds: int) -> dict[str, Any]:
    """Return memory, the largest error of a gradient and the times of all rounds."""
    torch.manual_seed(SEED)
    batch = {name: torch.randint(256, (MICROBATCHES, LENGTH)) for name in ("ids", "target")}
    plan = _plan_of(schedule, _orders_of(schedule, _Torch(schedule, batch)))
    make = {"executor": lambda: _Ours(plan, batch), "torch": lambda: _Torch(schedule, batch)}
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, {name: peak_bytes(of) for name, of in make.items()})
    runtimes = {name: of() for name, of in make.items()}
    for runtime in runtimes.values():
        runtime.step()
    ours, torchs = (runtimes[name].gradients() for name in ("executor", "torch"))
    error = max(float((g - torchs[name]).norm() / g.norm()) for name, g in ours.items())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runtimes}
    for number in range(rounds + 1):
        for name in list(runtimes)[:: -1 if number % 2 else 1]:
            found = _timed(runtimes[name])
            if number:
                times[name].append(found)
    return {
        "error": _over_ranks(error, dist.ReduceOp.MAX),
        "seconds": {name: [wall_s for wall_s, _ in row] for name, row in times.items()},
        "busy_seconds": {name: [busy_s for _, busy_s in row] for name, row in times.items()},
        "peak_bytes": peaks,
    }


class _Runtime(Protocol):
    def step(self) -> object: ...

    def gradients(self) -> dict[str, Tensor]: ...


def _timed(runtime: _Runtime) -> tuple[float, float]:
    """Return seconds of a step from barrier to barrier, and of all ranks' cores at work."""
    gc.collect()
    dist.barrier()
    start_s, start_busy_s = time.perf_counter(), time.process_time()
    runtime.step()
    busy_s = time.process_time() - start_busy_s
    dist.barrier()
    return time.perf_counter() - start_s, _over_ranks(busy_s, dist.ReduceOp.SUM)


def _over_ranks(value: float, operation: Any) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, operation)
    return float(total)


# --- the executor ---------------------------------------------------------------------------------


class _Ours:
    """One rank of the executor, without its optimizer."""

    def __init__(self, plan: Plan, batch: Batch) -> None:
        parts = {name: entry.chunk(MICROBATCHES) for name, entry in batch.items()}
        rows = [{name: part[k] for name, part in parts.items()} for k in range(MICROBATCHES)]
        prepared = prepare(plan, FACTORY, seed=SEED)
        self._trainer = Trainer.of_model(prepared, lambda step, microbatch: rows[microbatch])

    def step(self) -> object:
        return self._trainer.forward_backward(1)

    def gradients(self) -> dict[str, Tensor]:
        named = self._trainer.parameters.items()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}


def _plan_of(schedule: str, orders: Sequence[Sequence[Operation]]) -> Plan:
    """Return the plan that gives each rank its order."""
    job = Job(
        samples_per_microbatch=1,
        microbatches=MICROBATCHES,
        optimizer="sgd",
        max_stages_per_device=2,
        model_arguments=ARGUMENTS,
    )
    graph = trace(FACTORY, job)
    problem = Problem(graph, star(len(orders)), job, ModelSource(FACTORY, ARGUMENTS))
    layers, blocks = list(graph.layers), _blocks_of(schedule)
    cuts = [0, *(layers.index(f"h.{part[0]}") for part in blocks[1:]), len(layers)]
    parts = [tuple(layers[a:b]) for a, b in pairwise(cuts)]
    on = zip(parts, _ranks_of(schedule), strict=True)
    pipeline = place(problem, [StageSpec(part, (f"d{rank}",)) for part, rank in on])
    return plan_by_hand(pipeline, {f"d{rank}": list(order) for rank, order in enumerate(orders)})


# --- torch ----------------------------------------------------------------------------------------


class _Torch:
    """One rank under a schedule of torch's, with static shapes."""

    def __init__(self, schedule: str, batch: Batch) -> None:
        rank, on = dist.get_rank(), _ranks_of(schedule)
        torch.manual_seed(SEED)
        model = untied_gpt(**ARGUMENTS).train()
        last = len(on) - 1
        self._modules = {
            index: _Part(model, blocks, is_first=index == 0, is_last=index == last)
            for index, blocks in enumerate(_blocks_of(schedule))
            if on[index] == rank
        }
        self._batch = batch
        self._is_first, self._is_last = on[0] == rank, on[-1] == rank
        stages = [_stage(index, module, len(on)) for index, module in self._modules.items()]
        if schedule == "1f1b":
            self.schedule = Schedule1F1B(stages[0], MICROBATCHES, _cross_entropy)
        else:
            self.schedule = MULTIPLE[schedule](stages, MICROBATCHES, _cross_entropy)

    def step(self) -> object:
        for module in self._modules.values():
            module.zero_grad(set_to_none=True)
        arguments = (self._batch["ids"],) if self._is_first else ()
        target = self._batch["target"] if self._is_last else None
        losses: list[Tensor] | None = [] if self._is_last else None
        return self.schedule.step(*arguments, target=target, losses=losses, return_outputs=False)

    def gradients(self) -> dict[str, Tensor]:
        named = chain.from_iterable(m.named_parameters() for m in self._modules.values())
        return {name: p.grad.clone() for name, p in named if p.grad is not None}


class _Part(nn.Module):
    """Blocks of a GPT, with the embeddings before them or the head after them."""

    def __init__(self, model: GPT, blocks: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.wte, self.wpe, self.drop = model.wte, model.wpe, model.drop
        self.h = nn.ModuleDict({str(index): model.h[index] for index in blocks})
        if is_last:
            self.ln_f, self.lm_head = model.ln_f, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        """Token ids to hidden states to logits."""
        if self.is_first:
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            hidden = self.drop(self.wte(hidden) + self.wpe(positions))
        for block in self.h.values():
            hidden = block(hidden)
        return self.lm_head(self.ln_f(hidden)) if self.is_last else hidden


def _ranks_of(schedule: str) -> tuple[int, ...]:
    """Return the rank of each stage: in turn, or down and up again for the V."""
    once = tuple(range(dist.get_world_size()))
    if schedule == "1f1b":
        return once
    return (*once, *reversed(once)) if schedule == "zb-v" else (*once, *once)


def _blocks_of(schedule: str) -> list[range]:
    stages = len(_ranks_of(schedule))
    return [range(LAYERS * s // stages, LAYERS * (s + 1) // stages) for s in range(stages)]


def _stage(index: int, module: nn.Module, count: int) -> PipelineStage:
    """Return a stage with its boundaries as meta tensors, which take no memory."""

    def boundary(place: int) -> tuple[Tensor]:
        if place == 0:
            return (torch.empty((1, LENGTH), dtype=torch.int64, device="meta"),)
        shape = (1, LENGTH, WIDTH if place < count else VOCABULARY)
        return (torch.empty(shape, device="meta", requires_grad=True),)

    given, made = boundary(index), boundary(index + 1)
    return PipelineStage(module, index, count, CPU, input_args=given, output_args=made)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def _orders_of(schedule: str, runtime: _Torch) -> list[list[Operation]]:
    """Return each rank's operations as torch's schedule has them."""
    ranks = range(dist.get_world_size())
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, len(ranks)) for rank in ranks]
    rows = runtime.schedule.pipeline_order
    return [[_operation(str(action)) for action in rows[rank] if action] for rank in ranks]


def _operation(word: str) -> Operation:
    found = parse_operation(word)
    assert found is not None, f"torch's order has {word}, which is no operation of ours"
    return found


def _one_forward_one_backward(rank: int, ranks: int) -> list[Operation]:
    """Return the order that ``Schedule1F1B._step_microbatches`` runs, which it keeps in no list."""
    warm_up = min(MICROBATCHES, ranks - rank)
    forwards = [Operation(rank, "F", m) for m in range(MICROBATCHES)]
    order = forwards[:warm_up]
    for microbatch in range(MICROBATCHES):
        backward = Operation(rank, "B", microbatch)
        order += [backward, *forwards[warm_up + microbatch :][:1]]
    return order


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
