"""Meeting the other pipelines at the coordinator, which one rank may have to host."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from executor.coordinator.client import Client
from executor.coordinator.store import ABOUT
from executor.coordinator.supervised import SupervisedCoordinator
from executor.error_line import print_error
from executor.pipelines.seat import new_nonce
from executor.pipelines.setup import Setup
from planner.errors import PipeplanError


@contextmanager
def met(setup: Setup) -> Iterator[Client]:
    """The coordinator's client of this rank; inside, a coordinator runs that has the same work.

    Raises:
        PipeplanError: if the coordinator has another plan, or other options.
    """
    with _coordinator(setup), _client(setup) as client:
        _require_same_work(setup, client)
        yield client


@contextmanager
def _coordinator(setup: Setup) -> Iterator[None]:
    if not setup.seat.hosts_coordinator:
        yield
        return
    # Torchrun ends all ranks when one ends, so silence is a matter of its timeout here.
    supervised = SupervisedCoordinator(
        setup.work, setup.seat.meeting, setup.run.timeout_s, _end_all
    )
    try:
        yield
    finally:
        supervised.close()


def _end_all(why: str) -> None:
    """All ranks wait for the coordinator, this one's main thread too; torchrun ends the others."""
    try:
        print_error(why)
    finally:
        os._exit(1)


@contextmanager
def _client(setup: Setup) -> Iterator[Client]:
    seat = setup.seat
    client = Client(seat.meeting, seat.pipeline, seat.place.rank, new_nonce())
    try:
        yield client
    finally:
        client.close()


def _require_same_work(setup: Setup, client: Client) -> None:
    """Torchrun's own ranks have one command line."""
    if setup.seat.part is not None:
        return
    theirs, mine = json.loads(client.store.get(ABOUT)), setup.work.facts()
    different = [name for name in mine if theirs.get(name) != mine[name]]
    if different:
        raise PipeplanError(
            f"coordinator at {setup.seat.meeting}: it has {name} {theirs.get(name)}, here it is "
            f"{mine[name]}; start all with the same plan, --steps, --sync and --resume"
            for name in different
        )
