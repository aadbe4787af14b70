"""The functions that cases call, and ``probes KEY FILE KIND``, which runs a case in a rank.

Every rank of a case calls the same function; the figures of the first rank are kept.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.executor.single_process import CPU, SEED, Alone, Distances, batch_source
from benchmarks.gpu.cases import Shape, all_cases
from executor.detect.options import parse_options
from executor.detect.run import measure
from executor.distributed.process_group import (
    all_gather_single,
    device_of_this_process,
    process_group,
    reduce_scatter_single,
)
from executor.launch.config import TrainingConfig
from executor.launch.prepare import prepare
from executor.launch.run import RunSettings
from executor.profiling.measure import Patience
from executor.profiling.profile import ProfileRequest, profile
from executor.training.loop import StepMetrics
from executor.training.optimisation import StepOutcome
from executor.training.trainer import Trainer
from executor.training.training import run_training
from planner.cluster.cluster import Cluster
from planner.plan.plan import Plan

Row = dict[str, Any]
CLUSTER, COSTS = "cluster.toml", "costs-{}.json"


class Ours:
    """This rank's part of a plan, whose gradients are kept as the optimizer finds them.

    Args:
        plan: What to run, in a process group that exists.
        device: Where the rank's tensors are.
        autocast: What torch's autocast lowers operations to; None: nothing.
        keeps: Whether the gradients of a step are kept, which takes time.
    """

    def __init__(
        self, plan: Plan, device: torch.device, autocast: Any = None, keeps: bool = True
    ) -> None:
        part = prepare(plan, plan.model.factory, seed=SEED, device=device, autocast=autocast)
        batch_of = batch_source(plan, part.model)
        self.trainer = Trainer.of_model(part, batch_of, optimise=self._optimise)
        self.gradients: dict[str, Tensor] = {}
        self._keeps = keeps

    def _optimise(self, step: int) -> StepOutcome:
        held = self.trainer.parameters if self._keeps else {}
        self.gradients = {n: p.grad.clone() for n, p in held.items() if p.grad is not None}
        return self.trainer.optimisation.step(step)

    def error(self, expected: Mapping[str, Tensor]) -> float:
        """Return the largest relative error of a gradient; infinite if one is missing."""
        wanted = {name: x for name, x in expected.items() if name in self.trainer.parameters}
        same = wanted.keys() == self.gradients.keys()
        return error_of(self.gradients, wanted) if same else math.inf


def error_of(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative error of a gradient, in the Euclidean norm."""
    errors = Distances.of(*({n: x.cpu() for n, x in row.items()} for row in (found, expected)))
    return max(error if math.isfinite(error) else math.inf for error in errors.tensors.values())


def against_plain(shape: Shape, device: torch.device, reference: torch.device | None = None) -> Row:
    """Compare loss and gradients of two iterations with plain torch on the reference device."""
    # Torch uses TF32 in float32 convolutions unless told otherwise.
    torch.backends.cudnn.allow_tf32 = False
    plan, losses, gradients = shape.plan(), [], []
    with process_group(device):
        ours, plain = Ours(plan, device), Alone(plan, reference or device)
        for step in (1, 2):
            losses.append(abs(ours.trainer.step(step).loss / plain.forward_backward(step) - 1))
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, ours.error(plain.gradients()))
            gradients += everywhere
            plain.optimizer.step()
        ours.trainer.close()
    return {"loss_error": max(losses), "gradient_error": max(gradients)}


def model(shape: Shape, device: torch.device) -> Row:
    """Compare float32 with plain torch on the CPU, and bfloat16 with plain torch on the device.

    The error of bfloat16 against float32 is told as a multiple of plain torch's own.
    """
    plan = shape.in_bfloat16().plan()
    exact, plain = Alone(plan, device, "float32"), Alone(plan, device)
    loss, rounded = exact.forward_backward(1), plain.forward_backward(1)
    with process_group(device):
        ours = Ours(plan, device)
        loss_off = abs(ours.trainer.step(1).loss - loss)
        gradients_off = ours.error(exact.gradients())
        ours.trainer.close()
    # Where plain torch happens to be exact, half a unit of bfloat16 is no fault.
    unit = torch.finfo(torch.bfloat16).eps / 2
    own = error_of(plain.gradients(), exact.gradients())
    return {
        **against_plain(shape, device, CPU),
        "bfloat16_loss_over_plain": loss_off / max(abs(rounded - loss), unit * abs(loss)),
        "bfloat16_gradient_over_plain": gradients_off / max(own, unit),
    }


def collectives(shape: Shape, device: torch.device) -> Row:
    """Run each collective, and a message to itself, with a single rank.

    Raises:
        AssertionError: if one has another result than its input.
    """
    calls: dict[str, Callable[[Tensor, Tensor], object]] = {
        "all_reduce": lambda source, target: dist.all_reduce(target.copy_(source)),
        "broadcast": lambda source, target: dist.broadcast(target.copy_(source), 0),
        "reduce": lambda source, target: dist.reduce(target.copy_(source), 0),
        "all_gather": lambda source, target: dist.all_gather([target], source),
        "all_gather_single": lambda source, target: all_gather_single(target, source),
        "reduce_scatter_single": lambda source, target: reduce_scatter_single(target, source),
        "all_to_all_single": lambda source, target: dist.all_to_all_single(target, source),
        "gather": lambda source, target: dist.gather(source, [target]),
        "scatter": lambda source, target: dist.scatter(target, [source]),
        "barrier": lambda source, target: (target.copy_(source), dist.barrier()),
    }
    if device.type == "cuda":  # Gloo has no message of a rank to itself.
        calls["isend and irecv"] = _to_itself
    source = torch.arange(1024.0, device=device)
    with process_group(device) as machines:
        for name, call in calls.items():
            target = torch.zeros_like(source)
            call(source, target)
            assert target.equal(source), f"{name} changed its numbers"
        backend = dist.get_backend_config()
    row = {"backend": backend, "calls": list(calls), "machine": str(machines[0])}
    row |= {"torch": torch.__version__, "python": platform.python_version()}
    nccl = {"nccl": list(torch.cuda.nccl.version())} if device.type == "cuda" else {}
    return {**row, **nccl}


def _to_itself(source: Tensor, target: Tensor) -> None:
    ends = [dist.P2POp(dist.irecv, target, 0), dist.P2POp(dist.isend, source, 0)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()


def strategy(shape: Shape, device: torch.device, sync: str) -> Row:
    """Train with a strategy; compare its losses with plain torch's."""
    plan = shape.plan()
    history = _history(plan, device, 3, sync=sync)
    plain = Alone(plan, device)
    right = [plain.iterate(step) for step in (1, 2, 3)]
    # Pipelines that share iterations freely may report more of them than were asked for.
    errors = [abs(row.loss / loss - 1) for row, loss in zip(history, right, strict=False)]
    return {"first_loss_error": errors[0], "loss_error": max(errors)}


def _history(plan: Plan, device: torch.device, steps: int, **run: Any) -> list[StepMetrics]:
    config = TrainingConfig.parse({"steps": steps, "data": "random", "seed": SEED}, "the case")
    settings = RunSettings(plan.model.factory, device=device.type, timeout_s=60, **run)
    return run_training(plan, config, settings)


def detected(shape: Shape, device: torch.device) -> Row:
    """Write the cluster file of this device, which predictions read."""
    measure(parse_options(["--output", CLUSTER, "--device", device.type]), None)
    return {"cluster": Path(CLUSTER).read_text()}


def predicted(shape: Shape, device: torch.device, seconds: float, steps: int) -> Row:
    """Compare predicted with measured iterations of one stage and of four on one device.

    Raises:
        PipeplanError: if ``detected`` has not run in this folder.
    """
    cluster = Cluster.load(CLUSTER)
    costs = Path(COSTS.format(shape.model.replace(":", "-")))
    kind, patience = cluster.devices[0].type, Patience(seconds)
    sizes = (shape.samples,)
    request = ProfileRequest(shape.factory, shape.checked_job, sizes, device, kind, costs, patience)
    profile(request, lambda line: None)
    row: Row = {"roofline_error": _layers_s(shape, cluster) / _layers_s(shape, cluster, costs) - 1}
    for name, stages in {"one_stage": ("0",), "four_stages": ("0",) * 4}.items():
        plan = replace(shape, stages=stages).plan(cluster, costs)
        # The first iteration loads kernels.
        history = _history(plan, device, steps + 1)[1:]
        row[f"{name}_s"] = statistics.median(found.step_time_s for found in history)
        row[f"{name}_error"] = plan.predicted.iteration_time_s / row[f"{name}_s"] - 1
    return row


def _layers_s(shape: Shape, cluster: Cluster, costs: Path | None = None) -> float:
    """Seconds of all layers' forwards and backwards; without costs by the device's data sheet."""
    times = shape.placed(cluster, costs).stages[0].times[cluster.device_names[0]]
    return times.forward_s + times.backward_s


def overhead(shape: Shape, device: torch.device, steps: int, autocast: str) -> Row:
    """Time plain torch, the executor, and it with split backwards in turn; count its waits."""
    dtype, plan = getattr(torch, autocast), shape.plan()
    plain = Alone(plan, device, autocast=dtype)
    with process_group(device):
        ours = Ours(plan, device, dtype, keeps=False).trainer
        split = Ours(replace(shape, split=True).plan(), device, dtype, False).trainer
        runs = {"plain": plain.iterate, "ours": ours.step, "split": split.step}
        median = _in_turn(runs, steps, device)
        row: Row = {f"{name}_s": found for name, found in median.items()}
        row["overhead"] = median["ours"] / median["plain"] - 1
        row["split_over_whole"] = median["split"] / median["ours"] - 1
        return row | (_waits(ours, steps + 2) if device.type == "cuda" else {})


def _in_turn(
    runs: Mapping[str, Callable[[int], object]], steps: int, device: torch.device
) -> dict[str, float]:
    """Return the median seconds of each, after one iteration that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(1, steps + 2):
        for name, run in runs.items():
            begin_s = time.perf_counter()
            run(step)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(time.perf_counter() - begin_s)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def _waits(trainer: Trainer, step: int) -> Row:
    """Count the times that the host waits for the GPU in the microbatches of one iteration."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gathering = trainer.iterate(step)
    torch.cuda.set_sync_debug_mode("default")
    gathering.metrics()
    places = sorted({f"{Path(found.filename).name}:{found.lineno}" for found in caught})
    return {"waits_per_microbatch": len(caught) / trainer.plan.microbatches, "waits_in": places}


def memory(shape: Shape, device: torch.device) -> Row:
    """Compare the peak of allocated memory with the plan's."""
    plan = shape.plan()
    peak = max(found.peak_memory_bytes for found in _history(plan, device, 3))
    most = max(found.peak_memory_bytes for found in plan.predicted.devices.values())
    return {"peak_bytes": peak, "predicted_bytes": most, "memory_error": most / peak - 1}


def main(words: Sequence[str]) -> None:
    """Run a case in this rank; the first rank writes its figures to a file."""
    key, result, kind, *short = words
    case = next(case for case in all_cases(short=bool(short)) if case.key == key)
    row = globals()[case.probe](case.shape, device_of_this_process(kind), **case.options)
    if os.environ.get("RANK", "0") == "0":
        Path(result).write_text(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
