"""How long does one replay take? Usage: python -m benchmarks.plans.replays [--compare BUILD].

Prints CPU microseconds, the least of several rounds in one process: of the compiled replay, of
making its program from tables, and of ``simulate``, which makes the tables and a timeline besides.
--compare adds the ratios of these to the figures of another build, given by its checkout with an
interpreter in .venv, and requires the same iteration times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.plans.drawn import chain, two_level
from benchmarks.plans.runs import Build
from planner import Cluster, Job, LayerGraph, Problem
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.plan.operations import Operation, Orders, one_forward_one_backward
from planner.program.kernel import replay_once
from planner.program.lower.lower import lower_once, lower_orders
from planner.program.replay import replay
from planner.program.work import Work
from planner.simulation.simulator import simulate

SIZES = (
    (4, 8, 4, False),
    (8, 32, 8, True),
    (16, 64, 16, True),
    (8, 128, 64, True),
    (64, 128, 64, False),
)
"""Stages, microbatches, devices, and whether backwards are split."""


def pipelines() -> Iterator[tuple[str, PlacedPipeline, Orders]]:
    """Yield names, stages and their orders, 1F1B."""
    for stages, microbatches, devices, split in SIZES:
        graph = LayerGraph.parse(chain(stages, "transformer", 1, 0))
        cluster = Cluster.from_data(two_level([-(-devices // 8)], 8))
        job = Job(microbatches=microbatches, optimizer="sgd")
        each = devices // stages
        names = [cluster.device_names[n : n + each] for n in range(0, devices, each)]
        layers = list(graph.layers)
        specs = [StageSpec((layer,), tuple(of)) for layer, of in zip(layers, names, strict=True)]
        orders = {
            name: list(_order(stage, stages, range(number, microbatches, each), split))
            for stage, of in enumerate(names)
            for number, name in enumerate(of)
        }
        text = f"{stages} x {microbatches}, {devices} devices, {'split' if split else 'whole'}"
        yield text, place(Problem(graph, cluster, job), specs), orders


def _order(stage: int, stages: int, microbatches: range, split: bool) -> Iterator[Operation]:
    for row in one_forward_one_backward(stage, stages, stages, microbatches) or ():
        if split and row.kind == "B":
            yield row._replace(kind="I")
            yield row._replace(kind="W")
        else:
            yield row


def least_us(function: Callable[[], object], seconds: float) -> float:
    """Return the least CPU microseconds of a call, of five rounds that take so long together."""
    function()
    begin = time.thread_time()
    function()
    count = max(1, int(seconds / 5 / max(1e-7, time.thread_time() - begin)))
    found = []
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(count):
            function()
        found.append((time.thread_time() - begin) / count)
    return min(found) * 1e6


def rows(seconds: float) -> Iterator[list[str]]:
    """Yield a row for each size; each figure takes so many CPU seconds."""
    for text, placed, orders in pipelines():
        lowered = lower_orders(placed, orders)
        program, work = lowered.program, Work(lowered.program)
        blocks = (lowered.rows, lowered.schedule, lowered.wires, program, lowered.room)
        headers = [block.header for block in blocks]
        time_s = replay(program, work).time_s
        work.numbers["tells_links"] = 0
        calls = (
            lambda: replay_once(program.header, work.header),  # noqa: B023
            lambda: lower_once(*headers),  # noqa: B023
            lambda: simulate(placed, orders),  # noqa: B023
        )
        yield [text, repr(time_s), *(f"{least_us(call, seconds):.1f}" for call in calls)]


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.replays")
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU seconds for each figure")
    parser.add_argument("--compare", type=Path, metavar="BUILD", help="another build's checkout")
    options = parser.parse_args()
    others: dict[str, list[str]] = {}
    if options.compare:
        words = [__file__, f"--seconds={options.seconds}"]
        status, told = Build.at(options.compare.absolute()).run(words)
        if status:
            raise SystemExit(f"{options.compare} cannot measure replays: {told}")
        others = {row[0]: row for row in (x.strip("| ").split(" | ") for x in told.splitlines())}
    print("| stages x microbatches | iteration, s | replay | program | simulate |")
    print("|---|---|---|---|---|")
    for row in rows(options.seconds):
        if other := others.get(row[0]):
            if row[1] != other[1]:
                raise SystemExit(f"{row[0]}: {row[1]} s here, {other[1]} s there")
            ratios = (float(a) / float(b) for a, b in zip(row[2:], other[2:], strict=True))
            row[2:] = [f"{a} ({ratio:.2f})" for a, ratio in zip(row[2:], ratios, strict=True)]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
