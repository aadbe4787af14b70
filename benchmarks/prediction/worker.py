"""One rank of a measured plan: ``torchrun -m benchmarks.prediction.worker PLAN STEPS ANSWER``.

Each rank computes on one thread, as the system places it. Memory is measured first, by torch's
profiler, then the time of so many steps without it. Rank 0 writes the answer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.executor.peers.memory import held_memory
from executor.launch.prepare import Prepared, prepare
from executor.training.data import batches
from executor.training.trainer import Trainer
from planner.plan.plan import Plan

SEED = 5
WARM_UP = 2


class Training:
    """Whole iterations of a plan, the optimizer's step among them."""

    def __init__(self, prepared: Prepared) -> None:
        source = batches("random", prepared.model, prepared.plan.job, SEED)
        kept = {number: source(1, number) for number in range(prepared.plan.microbatches)}
        self._trainer = Trainer.of_model(
            prepared, lambda step, microbatch: kept[microbatch], timeout=timedelta(seconds=120)
        )
        self._step = 0

    def step(self) -> float:
        """One iteration; this rank's seconds of it."""
        self._step += 1
        dist.barrier()
        begin_s = time.perf_counter()
        self._trainer.step(self._step)
        return time.perf_counter() - begin_s

    def close(self) -> None:
        """Let the threads and connections of the run go."""
        self._trainer.close()


def main() -> None:
    """Measure, and let rank 0 write what all found."""
    plan, steps, answer = Plan.load(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainings: list[Training] = []
    held = held_memory(lambda: _added(trainings, plan))
    trainings.pop().close()
    training = _added(trainings, plan)
    times = torch.tensor([training.step() for _ in range(steps)], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, held.peak_bytes)
    if rank == 0:
        answer.write_text(json.dumps({"seconds": times.tolist()[WARM_UP:], "peak_bytes": peaks}))
    training.close()
    dist.destroy_process_group()
    # After a profiler of memory the interpreter's end now and then aborts in a thread of torch's.
    sys.stdout.flush()
    os._exit(0)


def _added(trainings: list[Training], plan: Plan) -> Training:
    trainings.append(Training(prepare(plan, plan.model.factory, seed=SEED)))
    return trainings[-1]


if __name__ == "__main__":
    main()
