"""The command lines that run a plan, as text for people."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from planner.cluster.cluster import node_name, node_of
from planner.job import LOSSES, Job, text_problem
from planner.plan.plan import Plan

_ZOO = "models."
MASTER = "MASTER_ADDRESS"
"""Placeholder for the address of the first host, which a cluster file does not have."""
MASTER_PORT = "29500"


@dataclass(frozen=True)
class HostCommand:
    """What to type on one host.

    Attributes:
        host: its name in the cluster; empty if the devices do not tell it.
        command: the command line.
    """

    host: str
    command: str


@dataclass(frozen=True)
class RunCommands:
    """How to start a plan's ranks.

    Attributes:
        hosts: what to type on each host; none if the ranks cannot be started so.
        explanation: where to type it and what to fill in, or why there is nothing to type.
    """

    hosts: tuple[HostCommand, ...]
    explanation: str

    def lines(self, start: str) -> list[str]:
        """Return them as lines for people.

        Args:
            start: what they do, such as ``run it``.
        """
        if len(self.hosts) == 1:
            return [f"{start} {self.explanation} with: {self.hosts[0].command}"]
        rows = [f"  {one.host}: {one.command}" for one in self.hosts]
        return [f"{start} {self.explanation}{':' if rows else ''}", *rows]


def run_commands(plan: Plan, path: Path, text_problem: str | None = None) -> RunCommands | None:
    """Return the commands that run a plan, one for each host; None for a plan without a model.

    They include the option that allows importing the code that the plan names.

    Args:
        plan: the plan. A device ``a/gpu0`` is on host ``a``; names without a slash leave open
            which host they are on, and count as one.
        path: path of its file.
        text_problem: why text cannot train the model, by its trace; the plan shows this only if its
            job lists the inputs. The commands then ask for random batches.
    """
    needs_random = text_problem or _text_problem_of_inputs(plan.job)
    return _commands(plan, path, ["--data", "random"] if needs_random else [])


def _commands(plan: Plan, path: Path, more: list[str]) -> RunCommands | None:
    if plan.model.factory is None:
        return None
    executor = ["-m", "executor", str(path), *leave_words(plan), *more]
    devices = plan.rank_devices
    # Devices without nodes are of one host, unless others have nodes.
    has_nodes = any(map(node_name, devices))
    host_of = node_of if has_nodes else lambda device: ""
    hosts = [(host, len(list(ranks))) for host, ranks in groupby(devices, host_of)]
    names = [host for host, _ in hosts]
    if len(hosts) == 1:
        words = ["torchrun", "--nproc-per-node", str(plan.world_size), *executor]
        which = f" ({names[0]})" if names[0] else ""
        return RunCommands((HostCommand(names[0], shlex.join(words)),), f"on one host{which}")
    if len(set(names)) < len(names):
        return RunCommands(
            (),
            "after planning again with the devices of each host together in the cluster file: "
            f"torchrun numbers the ranks of a host in a row, and these are on {', '.join(names)}",
        )
    commands = tuple(
        HostCommand(host, shlex.join([*_torchrun(len(hosts), rank, count), *executor]))
        for rank, (host, count) in enumerate(hosts)
    )
    return RunCommands(
        commands,
        f"with one command on each of {len(hosts)} hosts, where {MASTER} stands for an address of "
        f"{names[0]} that the others reach",
    )


def _torchrun(hosts: int, rank: int, processes: int) -> list[str]:
    return [
        *("torchrun", "--nnodes", str(hosts), "--node-rank", str(rank)),
        *("--nproc-per-node", str(processes)),
        *("--master-addr", MASTER, "--master-port", MASTER_PORT),
    ]


def data_line(text_problem: str | None) -> str:
    """Return a sentence about the data that the command of a traced model trains on."""
    drawn = "--data random draws a new example batch for every microbatch"
    if text_problem is None:
        return f"it trains on text; {drawn}, --config names your data"
    return f"{drawn}, --config names your data; {text_problem}"


def resume_commands(plan: Plan, path: Path) -> RunCommands | None:
    """Return the commands that resume from a checkpoint, whose folder is left to fill in.

    The data is left to fill in as well if it cannot have been text, since training has to continue
    with the same data.
    """
    needs_data = _text_problem_of_inputs(plan.job)
    data = ["--data", "DATA"] if needs_data else []
    return _commands(plan, path, [*data, "--resume", "CHECKPOINTS"])


def leave_words(plan: Plan) -> list[str]:
    """Return the option that allows importing the plan's code; a placeholder without a model."""
    factory, loss = plan.model.factory, plan.job.loss
    words = []
    if factory is None or not factory.startswith(_ZOO):
        words += ["--model", factory or "MODULE:FACTORY"]
    if loss not in LOSSES:
        words += ["--loss", loss]
    return words


def _text_problem_of_inputs(job: Job) -> str | None:
    """Return the reason why text cannot fill the inputs that a job lists; None if it lists none."""
    if not job.inputs:
        return None
    samples = job.samples_per_microbatch
    forms = {name: (spec.dtype, (samples, *spec.shape)) for name, spec in job.inputs.items()}
    return text_problem(forms, job)
