"""One rank of emulated and paced runs: ``torchrun pace_worker.py PLAN OUTPUT``.

The first rank writes, by kind of run and strategy, the times of the steps, and what share of its
last backward was left when the first reduction of each began.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from executor.emulation.emulation import emulating_trainer
from executor.emulation.pace import Pace
from executor.launch.prepare import prepare
from executor.launch.run import PlanRank
from executor.training.trainer import Trainer
from planner.plan.plan import Plan
from planner.prediction import with_strategy
from planner.sync.strategies import parse_sync

STRATEGIES = (
    "all_reduce:overlap=false",
    "all_reduce:bucket_mib=0.05",
    "fused:fusion_mib=0.05",
    "decoupled:bucket_mib=0.05",
    "cross_iteration",
)
STEPS = 3


def main(plan: Plan, output: Path) -> None:
    dist.init_process_group("gloo")
    place = PlanRank.of_this_process()
    slow = Pace({1: 2.0})
    found = {}
    for text in STRATEGIES:
        chosen = with_strategy(plan, parse_sync(text))
        found[f"emulated {text}"] = run(emulating_trainer(chosen, place))
        found[f"paced {text}"] = run(trainer(chosen, Pace()))
    found["slow emulated"] = run(emulating_trainer(plan, place, pace=slow))
    found["slow paced"] = run(trainer(plan, slow))
    if place.rank == 0:
        output.write_text(json.dumps(found))
    dist.destroy_process_group()


def trainer(plan: Plan, pace: Pace) -> Trainer:
    prepared = prepare(plan)
    batch = prepared.model.example_batch(plan.job.samples_per_microbatch)
    return Trainer.of_model(prepared, lambda step, microbatch: batch, pace=pace)


def run(stepper: Trainer) -> dict:
    times, shares = [], []
    for step in range(1, STEPS + 1):
        times.append(stepper.step(step).step_time_s)
        starts = [span.start_s for span in stepper.record.reductions]
        last = max(stepper.record.operations, key=lambda span: span.end_s)
        if starts:
            shares.append((last.end_s - min(starts)) / (last.end_s - last.start_s))
    stepper.close()
    return {"times_s": times, "shares_left": shares}


if __name__ == "__main__":
    main(Plan.load(sys.argv[1]), Path(sys.argv[2]))
