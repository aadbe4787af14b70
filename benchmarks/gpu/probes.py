"""Probes of one device: what a training's metrics do not show."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.detect.options import parse_options
from executor.detect.run import measure
from executor.distributed.process_group import process_group
from executor.launch.config import TrainingConfig
from executor.launch.prepare import prepare
from executor.launch.run import RunSettings
from executor.training.data import batches
from executor.training.loop import StepMetrics
from executor.training.trainer import Trainer
from executor.training.training import run_training
from planner.plan.plan import Plan

Row = dict[str, Any]


def environment(plan: Plan | None, device: torch.device) -> Row:
    """Versions, devices, and how they are joined."""
    row: Row = {"torch": torch.__version__, "python": platform.python_version()}
    row["cores"] = os.cpu_count()
    row["nccl"] = dist.is_nccl_available()
    if device.type == "cuda":
        row["cuda"] = torch.version.cuda
        row["devices"] = [
            torch.cuda.get_device_properties(k).name for k in range(torch.cuda.device_count())
        ]
        row["modules"] = os.environ.get("CUDA_MODULE_LOADING", "unset")
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
        row["topology"] = shown.stdout
    return row


def _trainer(plan: Plan, device: torch.device) -> Trainer:
    prepared = prepare(plan, plan.model.factory, device=device)
    return Trainer.of_model(prepared, batches("random", prepared.model, plan.job, 0))


def waits(plan: Plan | None, device: torch.device) -> Row:
    """Count the times that the host waits for the device in one iteration."""
    assert plan is not None
    with process_group(device):
        trainer = _trainer(plan, device)
        trainer.step(1)
        if device.type != "cuda":
            trainer.step(2)
            return {"waits": None, "note": "counted on a GPU only"}
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gathering = trainer.iterate(2)
        torch.cuda.set_sync_debug_mode("default")
        gathering.metrics()
    told = [f"{Path(row.filename).name}:{row.lineno}" for row in caught]
    return {"waits": len(told), "where": sorted(set(told))[:20]}


def profile(plan: Plan | None, device: torch.device) -> Row:
    """Time an iteration, its launches and the share of it in which the device works."""
    assert plan is not None
    with process_group(device):
        trainer = _trainer(plan, device)
        trainer.step(1)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        plain_s = trainer.step(2).step_time_s
        with torch.profiler.profile(activities=kinds) as found:
            step_s = trainer.step(3).step_time_s
    rows = found.key_averages()
    on_device_s = sum(row.self_device_time_total for row in rows) / 1e6
    launches = sum(row.count for row in rows if "LaunchKernel" in row.key)
    return {
        "step_s": plain_s,
        "profiled_step_s": step_s,
        "device_busy": on_device_s / step_s if device.type == "cuda" else None,
        "launches": launches,
    }


def copies(plan: Plan | None, device: torch.device) -> Row:
    """Measure copies between host and device, from pageable and from pinned memory, in GB/s."""
    bytes_ = 2**28 if device.type == "cuda" else 2**22
    row: Row = {"bytes": bytes_}
    there = torch.empty(bytes_, dtype=torch.uint8, device=device)
    for name in ("pageable", "pinned"):
        if name == "pinned" and device.type != "cuda":
            continue
        here = torch.empty(bytes_, dtype=torch.uint8, pin_memory=name == "pinned")
        row[f"{name}_in_gb_per_s"] = bytes_ / _seconds(there, here, device) / 1e9
        row[f"{name}_out_gb_per_s"] = bytes_ / _seconds(here, there, device) / 1e9
    return row


def _seconds(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        to.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def checkpoint(plan: Plan | None, device: torch.device) -> Row:
    """Resume on the device what the CPU trained, and the other way round."""
    assert plan is not None
    row: Row = {}
    for first, second in sorted({(device.type, "cpu"), ("cpu", device.type)}):
        resumed, whole = _resumed(plan, first, second)
        pairs = zip(resumed, whole, strict=True)
        row[f"{first} to {second}"] = max(abs(a.loss / b.loss - 1) for a, b in pairs)
    return row


def _resumed(plan: Plan, first: str, second: str) -> tuple[list[StepMetrics], list[StepMetrics]]:
    """Steps 3 and 4 on one device after two on another, and after two on the same."""

    def train(device: str, resume: str | None = None, **settings: Any) -> list[StepMetrics]:
        config = TrainingConfig.parse({"data": "random", **settings}, "checkpoint")
        return run_training(
            plan, config, RunSettings(plan.model.factory, device=device, resume=resume)
        )

    with tempfile.TemporaryDirectory() as folder:
        train(first, steps=2, checkpoint={"folder": folder, "every": 2})
        return train(second, folder, steps=4), train(second, steps=4)[2:]


def links(plan: Plan | None, device: torch.device) -> Row:
    """Measure the links between all ranks, and show the cluster file."""
    measure(parse_options(["--output", "links.toml", "--device", device.type]), None)
    written = Path("links.toml")
    return {"cluster": written.read_text() if written.exists() else None}


PROBES = {
    probe.__name__: probe for probe in (environment, waits, profile, copies, checkpoint, links)
}
