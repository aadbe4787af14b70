"""Weights put aside between two steps, for a pipeline that comes back."""

from __future__ import annotations

import json
import threading

import torch
from torch import Tensor

from executor.exchange.neighbours import Neighbours
from executor.exchange.tensor_calls import CallError, Header
from planner.errors import PipeplanError

_ANSWER_S = 0.5
"""Who asks for a step that has not come yet is told so after this time."""


class Snapshots:
    """Serves copies of this rank's state to other pipelines' ranks at the same place.

    Args:
        neighbours: who may ask.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._changed = threading.Condition()
        self._kept: tuple[int, dict[str, Tensor]] | None = None
        neighbours.server.handle("state", self._answer)

    def put_aside(self, step: int) -> None:
        """Keep a copy of the state before a step; one made for an earlier step is dropped."""
        state = self._neighbours.weights.state()
        with self._changed:
            self._kept = step, state
            self._changed.notify_all()

    def fetch(self, donor: int, life: int, step: int) -> None:
        """Take over a donor's state before a step, as soon as it has come there.

        Raises:
            CallError: if the donor is gone.
            RefusedError: if it has put another state aside meanwhile.
            PipeplanError: if it has another model.
        """
        calls = self._neighbours.caller()
        while True:
            header, tensors = calls.call(donor, life, "state", {"step": step})
            if "names" in header:
                break
            if calls.there().get(donor) != life:
                raise CallError(f"pipeline {donor}, whose weights were to be copied, is lost")
        state = dict(zip(json.loads(header["names"]), tensors, strict=True))
        self._neighbours.weights.load(state)

    @torch.no_grad()
    def _answer(self, header: Header, _: list[Tensor]) -> tuple[Header, list[Tensor]]:
        step = int(header["step"])
        with self._changed:
            self._changed.wait_for(
                lambda: self._kept is not None and self._kept[0] >= step, _ANSWER_S
            )
            if self._kept is None or self._kept[0] < step:
                return {}, []
            if self._kept[0] > step:
                raise PipeplanError(f"no state from before step {step} is kept here")
            state = self._kept[1]
        return {"names": json.dumps(list(state))}, list(state.values())
