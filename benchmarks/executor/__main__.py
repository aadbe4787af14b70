"""The executor: whether plans train as a single process does, and what running them costs.

Usage:
    python -m benchmarks.executor [--rows NAMES] [--trainings N] [--seed S] [--output FILE]
    python -m benchmarks.executor --parity N [--precision NAME] [--seed S] --json

    python -m benchmarks.executor --short [--json] [--claims FILE]

Without --parity it runs the whole table and writes Markdown. With --parity it draws N trainings,
compares each with a single process, prints one JSON object, and ends with status 1 if any differs.
With --short it checks the same bars on a few trainings and schedules and prints claims.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.executor import compare_peers as executor_peers
from benchmarks.executor import freedoms as executor_freedoms
from benchmarks.executor import member_steps, short
from benchmarks.executor import on_testbed as executor_testbed
from benchmarks.executor import overhead as executor_overhead
from benchmarks.executor import parity as executor_parity
from benchmarks.executor.freedoms_worker import STEPS, TRAININGS
from benchmarks.executor.plans import PRECISIONS
from benchmarks.reporting.claims import add_short_options, is_short, tell
from benchmarks.reporting.report import chosen_sections, heading, table, write_table
from planner import PipeplanError

Rows = Sequence[Sequence[object]]


@dataclass(frozen=True)
class Section:
    """A table of the report.

    Attributes:
        title: over it.
        about: what its figures are, in a sentence or two.
        columns: their names.
        rows: makes them, from the command line's options.
    """

    title: str
    about: str
    columns: Sequence[str]
    rows: Callable[[argparse.Namespace], Rows]


SECTIONS: dict[str, Section] = {
    "parity": Section(
        "Against a single process",
        "Random trainings of models of the zoo by verified plans, on two to six ranks, each for "
        "two iterations, in both precisions. A plan is of tensor-parallel groups of one size or "
        "several, or of single devices; stages are cut anywhere and several on a device, with one "
        "to three replicas and uneven microbatches; a third of the trainings goes on from a "
        "checkpoint under another plan of the same ranks, for two iterations more. A training "
        "counts in each row whose feature a plan of it has. Largest relative errors in the "
        "Euclidean norm: of the loss, of the gradient of a tensor (relative to a thousandth of the "
        "largest gradient if that is more), of all gradients as one vector, of a buffer, and of a "
        "parameter after the optimizer's step by the gradients found. Where the gradient of a "
        "tensor is beyond the bar in float32, the single process's own error against float64 is "
        "told: the tensor passes if it is within twice that.",
        executor_parity.FEATURE_COLUMNS,
        lambda options: executor_parity.feature_rows(options.trainings, options.seed),
    ),
    "peers": Section(
        "Beside torch's own pipeline runtime",
        "The same order of the same work in the same processes, turn by turn, forwards and "
        "backwards of all microbatches; torch with the faster (for memory: the leaner) of modules "
        "split by hand and of the executor's own cuts. Medians of ratios, ours over torch's, over "
        "the rounds of two launches.",
        executor_peers.COLUMNS,
        lambda options: executor_peers.rows(),
    ),
    "members": Section(
        "A split stage beside plain torch",
        "Two ranks of one tensor-parallel group run all of a model, four microbatches forward and "
        "backward; beside it the same in plain torch, with Megatron's collectives written by hand. "
        "Both take turns in the same processes. Medians of ratios, ours over plain torch's, over "
        "the rounds of two launches.",
        member_steps.COLUMNS,
        lambda options: [row.cells for row in member_steps.measured(20, 2)],
    ),
    "overhead": Section(
        "Over the simulator's iteration",
        "Four processes, operations of 5 ms and more that only take their time, messages of "
        "262 kB over loopback, every published schedule. Medians of the steps.",
        executor_overhead.COLUMNS,
        lambda options: executor_overhead.overhead_rows(options.steps),
    ),
    "freedoms": Section(
        "Everything at once, trained for real",
        "The planner's own plans for devices and links of the testbed that are "
        f"{executor_freedoms.DEVICES_SLOWER} and {executor_freedoms.LINKS_SLOWER} times slower: "
        "split backwards, two stages on a device, replicas, and reductions that overlap with the "
        "last backwards, all in each plan. Every operation computes, then waits until its "
        "predicted time is over; messages and all-reduces cross shaped links. Each plan is trained "
        f"{TRAININGS} times for {STEPS} iterations. Largest "
        "relative errors against a single process: of a loss, of the gradients of an iteration as "
        "one vector, and of a loss or weight in the whole training. Times are medians of the "
        "trainings' medians.",
        executor_freedoms.COLUMNS,
        lambda options: executor_freedoms.table_rows(),
    ),
    "prediction": Section(
        "Predicted against measured on the testbed",
        "Emulated compute, real messages and all-reduces over shaped links between network "
        "namespaces (TESTBED.md), plans of Pipeplan and of classic planners. Medians of the steps, "
        "and the spread of their middle half.",
        executor_testbed.PREDICTION_COLUMNS,
        lambda options: executor_testbed.prediction_rows(_testbed(options)),
    ),
    "speed_up": Section(
        "What our plans are worth on the testbed",
        "From the same runs: a rival's iteration over ours, predicted and measured.",
        executor_testbed.SPEED_UP_COLUMNS,
        lambda options: executor_testbed.speed_up_rows(_testbed(options)),
    ),
}


def _testbed(options: argparse.Namespace) -> Sequence[executor_testbed.Row]:
    return executor_testbed.measured_rows(options.steps, options.time_limit)


def run_table(options: argparse.Namespace) -> str:
    """All sections asked for, as Markdown."""
    parts = [heading("The executor", "python -m benchmarks.executor")]
    for name in chosen_sections(options.rows, SECTIONS):
        section = SECTIONS[name]
        rows = section.rows(options)
        parts.append(f"## {section.title}\n\n{section.about}\n\n{table(section.columns, rows)}")
    return "\n".join(parts)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.executor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument(
        "--parity", type=_count, metavar="N", help="run so many random trainings only"
    )
    found.add_argument("--json", action="store_true", help="print JSON")
    add_short_options(found)
    found.add_argument(
        "--precision", choices=PRECISIONS, help="with --parity: of all trainings; default: each"
    )
    count = executor_parity.TRAININGS
    found.add_argument("--trainings", type=_count, default=count, metavar="N", help="of the table")
    found.add_argument("--seed", type=int, default=0, help="of the random trainings")
    found.add_argument("--steps", type=_count, default=16, help="of each emulated run")
    found.add_argument(
        "--time-limit", type=float, default=20.0, metavar="S", help="of each search of a plan"
    )
    found.add_argument("--rows", help="sections to run: " + ", ".join(SECTIONS))
    found.add_argument("--output", type=Path, help="write the table to this file")
    return found


def _count(word: str) -> int:
    count = int(word)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{word} is not above 0")
    return count


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    options = parser().parse_args(words)
    if options.short and options.parity is not None:
        parser().error("--short and --parity are two forms; give one of them")
    if not options.short and options.json != (options.parity is not None):
        parser().error("--parity N and --json go together")
    if options.parity is not None:
        precisions = PRECISIONS if options.precision is None else (options.precision,)
        found = executor_parity.run_parity(options.parity, options.seed, precisions)
        print(json.dumps(found))
        return 1 if found["failures"] else 0
    try:
        if is_short(parser(), options):
            tell(short.entries(options.seed), options.claims, as_json=options.json)
            return 0
        text = run_table(options)
    except PipeplanError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    write_table(text, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
