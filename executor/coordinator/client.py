"""A rank's side of the coordinator: asks, waits, asks again, and gives signs of life."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from executor.coordinator.line import Channel, fenced
from executor.coordinator.messages import Ask, Hello, Incarnations, Take, answers_of, groups_of
from executor.coordinator.secret import key_of
from executor.coordinator.store import BEAT_S, Meeting, beats_of
from executor.launch.console import print_error

_FENCED_GRACE_S = 3.0
"""A rank that is given up has so long to find it out and report it by itself."""


def _is_of(body: Mapping[str, Any], kind: str, step: int) -> bool:
    return body["kind"] == kind and bool(body["step"] == step)


@dataclass(frozen=True)
class Welcome:
    """The coordinator's answer to a rank that begins.

    Attributes:
        incarnation: of its pipeline.
        step: its first.
        donor: pipeline and incarnation whose weights before that step it copies; None: it has
            its own.
    """

    incarnation: int
    step: int
    donor: tuple[int, int] | None


@dataclass(frozen=True)
class WorkUnit:
    """The work unit that a step trains on.

    Attributes:
        number: of the share; None: the work is over.
        there: incarnations of the pipelines that take part, by number.
        snapshot: put the weights aside for somebody first.
    """

    number: int | None
    there: dict[int, int]
    snapshot: bool


@dataclass(frozen=True)
class GroupAssignment:
    """Whom to average with.

    Attributes:
        number: in the global order; None: with nobody.
        members: pipelines with their incarnations, this one among them.
        generation: of their process group.
    """

    number: int | None
    members: Incarnations
    generation: int


class Client:
    """One rank's connection to the coordinator.

    Groups may be asked for on another thread than everything else.

    Args:
        meeting: where it is met.
        pipeline, place: of this rank.
        incarnation_id: of its pipeline's incarnation, the same on all its places.

    Attributes:
        key: of the training.

    Raises:
        PipeplanError: if nobody answers, or others have another secret.
    """

    def __init__(
        self,
        meeting: Meeting,
        pipeline: int,
        place: int,
        incarnation_id: str,
    ) -> None:
        self.meeting = meeting
        self.pipeline = pipeline
        self.place = place
        self.incarnation_id = incarnation_id
        self.store = meeting.connect()
        self.key = key_of(self.store)
        self._work = Channel(
            self.store, answers_of(pipeline, place, incarnation_id), str(meeting), self.key
        )
        self._groups = Channel(
            meeting.connect(), groups_of(pipeline, place, incarnation_id), str(meeting), self.key
        )
        self._at_each_beat: list[Callable[[Store], None]] = []
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="pipeplan-beat", daemon=True).start()

    def begin_again(self, incarnation_id: str) -> None:
        """Go on as a new incarnation of the pipeline."""
        self.incarnation_id = incarnation_id
        self._work.listen_to(answers_of(self.pipeline, self.place, incarnation_id))
        self._groups.listen_to(groups_of(self.pipeline, self.place, incarnation_id))

    def at_each_beat(self, call: Callable[[Store], None]) -> None:
        """Have something called with each sign of life, on its thread and with its connection."""
        self._at_each_beat.append(call)

    def close(self) -> None:
        """Give no more signs of life."""
        self._over.set()

    def hello(self) -> Welcome:
        """Say that this rank is ready, and wait until all are.

        Raises:
            NothingLeftError: if there is nothing to take part in.
        """
        body = self._work.asked(Hello(**self._from()), lambda body: body["kind"] == "welcome")
        donor = None if body["donor"] is None else (body["donor"][0], body["donor"][1])
        return Welcome(body["incarnation"], body["step"], donor)

    def take(self, step: int, reduced: bool) -> WorkUnit | None:
        """Ask for the share of a step.

        Args:
            step: of this pipeline, from 1.
            reduced: whether the reductions of the step before succeeded.

        Returns:
            The share; None: put the weights aside for somebody, and ask again.

        Raises:
            FencedError: if the others go on without this pipeline.
        """
        body = self._work.asked(
            Take(**self._from(), step=step, reduced=reduced),
            lambda body: body["kind"] == "snapshot" or _is_of(body, "share", step),
        )
        if body["kind"] == "snapshot":
            return None
        there = {int(number): incarnation for number, incarnation in body["there"].items()}
        return WorkUnit(body["share"], there, body["snapshot"])

    def ask(self, step: int, reduced: bool = True) -> GroupAssignment:
        """Ask whom to average with; nobody, while the coordinator is away.

        Args:
            step: that this rank has done.
            reduced: whether the average before succeeded, if :meth:`take` does not say it.

        Raises:
            FencedError: if the others go on without this pipeline.
        """
        message = Ask(**self._from(), step=step, reduced=reduced)
        body = self._groups.asked(message, lambda body: _is_of(body, "group", step))
        if body["kind"] == "away":
            return GroupAssignment(None, (), 0)
        members = tuple((number, incarnation) for number, incarnation in body["members"])
        return GroupAssignment(body["number"], members, body["generation"])

    def _from(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline,
            "place": self.place,
            "incarnation_id": self.incarnation_id,
        }

    def _beat(self) -> None:
        store = self.meeting.connect()
        while not self._over.is_set():
            try:
                incarnation_id = self.incarnation_id
                beats = store.add(beats_of(self.pipeline, self.place, incarnation_id), 1)
                for line in (self._work, self._groups):
                    line.remind(store, time.monotonic())
                for call in self._at_each_beat:
                    call(store)
            except (RuntimeError, ConnectionError):
                return  # The store is gone, and the rank finds out by itself.
            if beats < 0 and incarnation_id == self.incarnation_id:
                self._end_if_it_does_not()
                return
            self._over.wait(BEAT_S)

    def _end_if_it_does_not(self) -> None:
        """It may wait for another rank of its pipeline, which has been stopped, say, for long."""
        if self._over.wait(_FENCED_GRACE_S):
            return
        try:
            print_error(fenced(self.pipeline))
        finally:
            # Whoever read that may be gone as well.
            os._exit(1)
