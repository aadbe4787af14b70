"""Strategies of synchronisation, side by side: the papers' tables again, real and simulated.

Usage:
    python -m benchmarks.sync [--rows NAME ...] [--seeds N] [--steps N] [--report PATH]
    python -m benchmarks.sync --short --json
    python -m benchmarks.sync --short --rows loopback --settings homogeneous one_4x_slow \
        --claims FILE

Real rows are processes over gloo whose computation is emulated: a training step takes 100 ms by
the clock, whatever the machine, and the model learns for real. The rows ``shaped``, ``legs`` and
``pipelines`` need root on Linux and are told as skipped elsewhere; --short leaves these,
``predicted``, ``modulations`` and ``choice`` out unless --rows names them.
``predicted`` compares the simulator with the measured rows in benchmarks/SYNC.md and needs no real
run, nor does ``choice``. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reporting.claims import add_claims_option, append, begin
from benchmarks.reporting.report import heading
from benchmarks.sync import pipelines as sync_pipelines
from benchmarks.sync import predicted as sync_predicted
from benchmarks.sync import regret as sync_regret
from benchmarks.sync import rivals as sync_rivals
from benchmarks.sync import sections
from benchmarks.sync import servers as sync_servers
from benchmarks.sync import shaped as sync_shaped
from benchmarks.sync import short as claims
from benchmarks.sync.claims import Outcome
from benchmarks.sync.loopback import (
    SETTINGS,
    TRACE,
    Loopback,
    accuracy_section,
    loopback_section,
)
from benchmarks.sync.settings import strategies_of
from planner import PipeplanError
from planner.sync.choice import HORIZON, SEEDS

SHORT_STEPS, STEPS = 30, 100
ONLY_LONG = ("shaped", "legs", "predicted", "pipelines", "modulations", "choice")
ABOUT = """\
A share is what one pipeline does in one iteration. Throughput is shares a second in steady state,
without each pipeline's first steps and without what follows the first pipeline's last step; of
all-reduce it is pipelines times steps a second. The time to the loss is from the first step until
the held-out loss of the pipelines' mean model is what overlapped all-reduce has after half of its
work; real ones are looked at after as many steps as there are pipelines. Ratios above 1 are faster.
Ratios are taken seed by seed and told as mean (min..max); "best" and "worst" claims name the regime
they were found in.

What is faster is reached only at an equal held-out loss: after equal work it is at most 1 % above
the rival's, or the time and the iterations are those to one held-out loss. Without --short every
real strategy has the best of five learning rates, tried with a seed that does not count, and every
simulated server, and every strategy that the choice is compared with, the best of five in each
setting; elsewhere all have the same one.
Asynchronous servers divide it by the pipelines themselves. All-reduces over shaped links have
buckets of 0.1 MiB, so that there is something to overlap; on loopback one bucket of the whole model
is faster, and is the rival. With 30 or 100 iterations the pauses that a seed happens to draw move
all-reduce's figure: the regime tells how many there were and how many were to be expected.
"""


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        title: over it.
        about: what it is.
        run: makes it.
    """

    title: str
    about: str
    run: Callable[[], Outcome]


def sections_of(options: argparse.Namespace) -> dict[str, Section]:
    """Return all of them, by the names that ``--rows`` takes."""
    simulated = _simulated_sections(options.seeds, options.settings, short=options.short)
    return {**_real_sections(options), **simulated}


def _real_sections(options: argparse.Namespace) -> dict[str, Section]:
    """Return the sections of real runs, and of the simulator against them."""
    short, seeds = options.short, options.seeds
    is_part = short or options.settings or options.strategies
    loopback = Loopback(
        1 if short else seeds,
        options.steps,
        short=short,
        only=options.settings,
        strategies=options.strategies,
    )
    return {
        "loopback": Section(
            "Eight real pipelines on loopback",
            "8 processes under one torchrun, an MLP of 85,002 parameters on a teacher's labels, "
            "100 ms of emulated compute an iteration.",
            # A trace calibrates rows of its day: a part of these keeps the one that is there.
            lambda: loopback_section(loopback, None if is_part else TRACE),
        ),
        "accuracy": Section(
            "The simulator against reality",
            "The same trainings; the simulated world is the plan's, with what one trace measured.",
            lambda: accuracy_section(loopback),
        ),
        "shaped": Section(
            "Real pipelines on shaped links",
            "Network namespaces with token buckets (TESTBED.md); real messages.",
            lambda: sync_shaped.shaped_section(seeds, options.given_steps, short=short),
        ),
        "legs": Section(
            "Real pipelines where one node's link is slow",
            "Network namespaces with token buckets; throughput alone, every strategy at the same "
            "learning rate. First the trace is written that calibrates the simulator.",
            lambda: sync_shaped.legs_section(seeds, options.given_steps),
        ),
        "predicted": Section(
            "The simulator against measured rows",
            "The rows above, predicted without running anything. What the machine adds is of the "
            "same days: one trace of `partial_all_reduce:schedule=static` tells it on loopback and "
            "shaped links, of equal workers on loopback, and another one where one leg is slow, of "
            "groups on two nodes with 2 MB/s between them. Bandwidths are those of the cluster "
            "files.",
            lambda: sync_predicted.predicted_section(seeds),
        ),
        "pipelines": Section(
            "SDPipe's random sleeps, really",
            "Real processes on shaped links: four pipelines of four places, and two beside a slow "
            "node. These pipelines flush after each work unit, all strategies' alike; SDPipe's own "
            "do not (1F1B with weight stashing), so that its figures are of another pipeline.",
            lambda: sync_pipelines.pipelines_section(seeds, options.given_steps, short=short),
        ),
        "modulations": Section(
            "PS+ against parameter servers, really",
            "Real processes as in the first section: PS+ with its three modulations where "
            "gradients are of different ages, each strategy at its best of five learning rates "
            "with momentum 0.9 and of ten times these without, in each setting. The held-out loss "
            "is what the synchronous server has after half of its work.",
            lambda: sync_servers.real_servers_section(seeds, options.given_steps),
        ),
    }


def _simulated_sections(
    seeds: int, only: Sequence[str] | None, *, short: bool
) -> dict[str, Section]:
    return {
        "links": Section(
            "Equal workers and their links",
            "Simulated.",
            lambda: sections.links_section(seeds, short=short),
        ),
        "slow": Section(
            "One slow worker among sixteen",
            "Simulated.",
            lambda: sections.slow_section(seeds, short=short),
        ),
        "sleeps": Section(
            "SDPipe's random sleeps",
            "Simulated: pipelines of four places, which flush after each iteration; SDPipe's own "
            "do not.",
            lambda: sections.sleeps_section(seeds, short=short),
        ),
        "servers": Section(
            "PS+ against parameter servers",
            "Simulated: PS+ with its three modulations of stale gradients, each strategy at its "
            "own best learning rate. The held-out loss is what the synchronous server has after "
            "half of its work.",
            lambda: sync_servers.servers_section(seeds, short=short),
        ),
        "rivals": Section(
            "Strategies as published, beside ours",
            "Simulated: HetPipe's waves by their distance, each pipeline a worker that flushes "
            "after each wave (HetPipe's own does not), and Ripples' slowdown filter, which is the "
            "initiator's alone (`filter_between=initiator`), beside ours, which divides by bands. "
            "16 workers in 4 nodes; one learning rate for all.",
            lambda: sync_rivals.rivals_section(seeds, short=short),
        ),
        "choice": Section(
            "What the choice costs",
            f"Simulated: the strategy that `--sync choose` takes, by {HORIZON} iterations with "
            f"{SEEDS} seeds, against the fastest of all but asynchronous servers in 400 iterations "
            f"with {seeds} others. The regret is by how much more time the chosen one needs, in "
            "the geometric mean, to the held-out losses that overlapped all-reduce has after 10, "
            "20, 30, 40 and 50 % of its work, each strategy at the learning rate of five that is "
            "soonest there with half as many seeds more. Real rows of the same settings tell it "
            "again, by the time to the last of these losses, each strategy at its best rate among "
            "equal pipelines; those of slow legs have throughput alone.",
            lambda: sync_regret.choice_section(seeds, only),
        ),
        "overlap": Section(
            "Behind the next iteration",
            "Simulated: cross_iteration and decoupled against buckets behind the backward, which "
            "takes twice as long as a forward: were each half of decoupled's all-reduce hidden as "
            "far as it can be, it would gain at most 1.25, where the all-reduce takes 4/3 of the "
            "computation.",
            lambda: sections.overlap_section(seeds, short=short),
        ),
        "scale": Section(
            "The simulator's own speed",
            "One process, one core.",
            lambda: sections.scale_section(short=short),
        ),
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.sync",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--rows", nargs="+", metavar="NAME", help="sections; default all")
    found.add_argument(
        "--settings",
        nargs="+",
        metavar="NAME",
        choices=sorted(SETTINGS),
        help="only these, of loopback",
    )
    found.add_argument(
        "--strategies",
        nargs="+",
        metavar="NAME",
        choices=strategies_of(short=False),
        help="only these and their rivals, of loopback",
    )
    found.add_argument("--seeds", type=int, metavar="N", help="default 3, with --short 1")
    found.add_argument("--steps", type=int, metavar="N", help="of each real training")
    found.add_argument("--short", action="store_true", help="fewer of everything: ten minutes")
    found.add_argument("--json", action="store_true", help="a line a strategy and setting")
    add_claims_option(found)
    found.add_argument("--report", type=Path, metavar="PATH", help="write Markdown to this file")
    return found


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with its defaults filled in."""
    options = parser().parse_args(words)
    options.seeds = options.seeds or (1 if options.short else 3)
    options.given_steps = options.steps
    options.steps = options.steps or (SHORT_STEPS if options.short else STEPS)
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    options = options_of(words)
    known = sections_of(options)
    names = options.rows or [n for n in known if not (options.short and n in ONLY_LONG)]
    unknown = [name for name in names if name not in known]
    if unknown:
        told = f"--rows: {', '.join(unknown)} is not known; choose from {', '.join(known)}"
        print(told, file=sys.stderr)
        return 1
    given = [f" --{word}" for word in ("short", "json") if getattr(options, word)]
    rows = f" --rows {' '.join(options.rows)}" if options.rows else ""
    for name in ("settings", "strategies"):
        chosen = getattr(options, name)
        rows += f" --{name} {' '.join(chosen)}" if chosen else ""
    steps = f" --steps {options.given_steps}" if options.given_steps else ""
    command = f"python -m benchmarks.sync{rows} --seeds {options.seeds}{steps}{''.join(given)}"
    parts = [heading("Synchronisation between pipelines", command), ABOUT]
    if options.claims:
        begin(options.claims)
    for name in names:
        begin_s = time.monotonic()
        try:
            outcome = known[name].run()
        except PipeplanError as error:
            print("\n".join(error.problems), file=sys.stderr)
            return 1
        print(f"{name}: {time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)
        if options.json:
            for line in outcome.lines:
                print(json.dumps(line), flush=True)
        if options.claims:
            append(claims.entries(name, known[name].title, outcome), options.claims)
        parts.append(f"## {known[name].title}\n\n{known[name].about}\n\n{outcome.markdown()}")
        if options.report:
            # After each section: what took an hour is not lost with what comes after it.
            options.report.write_text("\n".join(parts))
    if options.claims:
        append(claims.left_out(known, names, options), options.claims)
    if not (options.json or options.report or options.claims):
        print("\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
