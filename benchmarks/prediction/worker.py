"""One rank of a plan: ``torchrun -m benchmarks.prediction.worker PLAN STEPS TURNS FOLDER``.

Each rank computes on one thread, as the system places it. Memory is measured first, by torch's
profiler. Then come turns: one rank after the other profiles the model's layers while the others
wait, and all train for some steps. What they found, and the costs of every turn, go to the folder.
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

from benchmarks.executor.memory import peak_bytes
from executor.launch.prepare import Prepared, prepare
from executor.profiling.measure import CacheSweep, MeasuredLayer, Patience, optimizer_costs
from executor.profiling.profile import with_row, without_figures
from executor.profiling.sizes import sized_models
from executor.training.batches import batches
from executor.training.trainer import Trainer
from planner.cluster.device_types import cpu_type
from planner.model.measured_costs import Costs
from planner.plan.plan import Plan

ANSWER, COSTS = "answer.json", "turn-{}.json"
"""What is written: seconds of every step by turn, peaks by rank; costs before each turn, and
after the last."""
SEED = 5
WARM_UP = 2
PATIENCE = Patience(seconds=0.2)
"""A layer is measured as shortly as this in a turn, and in all turns as long as in a profile."""
_CPU = torch.device("cpu")


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


class Profiler:
    """A model's layers, ready to be profiled as `pipeplan profile` does it, again and again.

    Args:
        plan: of the model.
    """

    def __init__(self, plan: Plan) -> None:
        factory, self._job = str(plan.model.factory), plan.job
        model = sized_models(factory, plan.job, plan.job.samples_per_microbatch)[0]
        self._empty = without_figures([model], _CPU, cpu_type().name)
        sweep = CacheSweep(_CPU, sum(weight.bytes for weight in model.graph.parameters))
        firsts = [kind.layers[0] for kind in self._empty.kinds]
        self._layers = [MeasuredLayer(model, name, _CPU, sweep) for name in firsts]

    def costs(self) -> Costs:
        """Profile all layers once."""
        costs = self._empty
        for number, layer in enumerate(self._layers):
            costs = with_row(costs, number, layer.costs(PATIENCE))
        step = optimizer_costs(self._job, _CPU, PATIENCE)
        return costs.model_copy(update={"optimizer": step})


def main() -> None:
    """Measure, and let rank 0 write what all found."""
    plan, folder = Plan.load(sys.argv[1]), Path(sys.argv[4])
    steps, turns = int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainings: list[Training] = []
    peak = peak_bytes(lambda: _added(trainings, plan))
    trainings.pop().close()
    training = _added(trainings, plan)
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    profiler = Profiler(plan)
    for _ in range(WARM_UP):
        training.step()
    seconds = []
    for turn in range(turns + 1):
        if rank == turn % dist.get_world_size():
            profiler.costs().save(folder / COSTS.format(turn))
        if turn < turns:
            times = torch.tensor([training.step() for _ in range(steps)], dtype=torch.float64)
            dist.all_reduce(times, dist.ReduceOp.MAX)
            seconds.append(times.tolist())
    if rank == 0:
        (folder / ANSWER).write_text(json.dumps({"seconds": seconds, "peak_bytes": peaks}))
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
