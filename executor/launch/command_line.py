"""The options of ``python -m executor``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from executor.launch.rank_options import (
    Add,
    RankParser,
    add_rank_options,
    timeout_seconds,
    whole_number,
)
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from executor.emulation.pace import Pace
    from executor.launch.config import TrainingConfig
    from executor.launch.run import RunSettings


def config_of(options: argparse.Namespace) -> TrainingConfig:
    """Return the training file with the options over it.

    Raises:
        PipeplanError: naming every wrong field.
    """
    from executor.launch.config import TrainingConfig

    loaded = TrainingConfig.load(options.config) if options.config else TrainingConfig()
    given = {name: getattr(options, name) for name in ("steps", "seed", "data", "timeline")}
    given = {name: value for name, value in given.items() if value is not None}
    return TrainingConfig.parse({**loaded.model_dump(exclude_unset=True), **given}, "options")


def run_of(options: argparse.Namespace) -> RunSettings:
    """Return how the plan is run: the options that bear the names of fields of the settings."""
    from executor.launch.run import RunSettings

    # --data is over the training file's already.
    names = {field.name for field in fields(RunSettings)} - {"data"}
    given = {name: value for name, value in vars(options).items() if name in names}
    return RunSettings(**given, pace=_pace_of(options))


def _pace_of(options: argparse.Namespace) -> Pace | None:
    from executor.emulation.pace import Pace

    if options.emulate or options.emulate_speed:
        return Pace.parse(options.slow, options.sleep, options.seed or 0)
    if options.slow or options.sleep:
        raise PipeplanError(
            "slow, sleep: they are of emulated machines; add --emulate-speed, or --emulate"
        )
    return None


def parser() -> argparse.ArgumentParser:
    """Every option with its help."""
    found = RankParser(
        "executor",
        "Train a model by a plan, one process a device of the plan.",
    )
    _add_training(found.add_argument)
    add_rank_options(found.add_argument)
    _add_emulation(found.add_argument_group("emulation").add_argument)
    _add_synchronisation(found.add_argument_group("synchronisation").add_argument)
    return found


def _add_training(add: Add) -> None:
    add("plan", help="plan file written by `pipeplan plan`")
    add("--config", metavar="FILE", help="training file (TOML)")
    add(
        "--steps",
        type=whole_number(1),
        help="total iterations (default: the training file's, or 20)",
    )
    add(
        "--data",
        metavar="DATA",
        help="text: bytes of the Python standard library's sources (default), for models of 256 "
        "tokens or more; random: the model's example_batch, or the job's [inputs], drawn anew for "
        "every microbatch; "
        "module:factory: a map-style or iterable data set of your own, or a generator function",
    )
    add(
        "--model",
        metavar="MODULE:FACTORY",
        help="allow importing this factory, for a plan whose model is not in the zoo",
    )
    add(
        "--loss",
        metavar="MODULE:FUNCTION",
        help="allow importing this function, for a plan whose loss is your own",
    )
    add(
        "--seed",
        type=whole_number(0),
        help="seed of weights, data and dropout (default: the training file's, or 0)",
    )
    add(
        "--resume",
        type=Path,
        metavar="DIR",
        help="resume from a checkpoint, or from the newest whole one in DIR; without one, training "
        "begins at step 1",
    )
    add(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not compare two small steps with eager autograd first",
    )
    add("--timeline", metavar="FILE", help="write the measured timeline as a Chrome trace")
    add(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="write the metrics of each step as a line of JSON",
    )


def _add_emulation(add: Add) -> None:
    add(
        "--emulate",
        action="store_true",
        help="replace compute by waits of the predicted time; messages are real",
    )
    add(
        "--emulate-speed",
        action="store_true",
        help="compute, then wait until the predicted time of the operation has passed",
    )
    add(
        "--slow",
        metavar="RANK=FACTOR[,...]",
        help="with either of these: slow the operations of some ranks down by a factor",
    )
    add(
        "--sleep",
        metavar="PROBABILITY:SECONDS",
        help="with either of these: random pauses of a rank at the start of an iteration",
    )


def _add_synchronisation(add: Add) -> None:
    add(
        "--sync",
        metavar="NAME[:OPTION=VALUE,...]",
        help="synchronisation strategy, overrides the plan's, such as all_reduce:bucket_mib=10",
    )
    add(
        "--pipeline",
        type=whole_number(0),
        metavar="I",
        help="these processes are one pipeline of the plan; give --coordinator too",
    )
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="where python -m executor.coordinator listens",
    )
    add(
        "--group-timeout",
        dest="group_timeout_s",
        type=timeout_seconds,
        metavar="SECONDS",
        help="leave out a pipeline for which its group has waited this long (default: 30)",
    )
    add("--sync-trace", metavar="FILE", help="write the measured synchronisation trace")
    add(
        "--inject",
        default="",
        metavar="FAULTS",
        help='inject faults, such as "fail_at(2,5) stop_in(1,9,3)": pipeline 2 dies at its '
        "step 5, pipeline 1 stops for 3 s within the averages of its step 9",
    )
