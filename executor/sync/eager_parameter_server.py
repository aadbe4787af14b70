"""PS+ of Jin's thesis (HKU 2023): push and pull apart, both overlapped with computation."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from torch import Tensor

from executor.elastic.neighbours import Neighbours
from executor.elastic.tensor_calls import CallError, Header
from executor.sync.parameter_server import ServedGradients
from executor.sync.protocol import DecentralizedStrategy, Optimise
from executor.training.master_weights import MakeOptimizer
from executor.training.optimisation import StepOutcome
from planner.sync.strategies import EagerParameterServerOptions

_Pulled = dict[int, tuple[int, list[Tensor]]]
"""Version and weights of each part."""


class EagerParameterServer(DecentralizedStrategy):
    """Computes on weights that were fetched while the iteration before was computed.

    As soon as an iteration starts, the weights for the next one are pulled; its gradient is pushed
    without waiting. Who has pushed or pulled slower than it computes goes on with the weights it
    has, and waits only for the push before. As with an asynchronous server the learning rate is
    divided by the number of pipelines. It is lowered by the gradient's staleness: the updates
    between the version it was computed on and the newest one this rank knows of as it pushes, from
    a pull or from the answer to a push. Momentum and Adam's moments are the servers', one set for
    all.

    Args:
        neighbours: at this rank's place.
        make_optimizer: of the parameters on a server.
        options: how staleness lowers the learning rate, and how many pipelines serve.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        make_optimizer: MakeOptimizer,
        options: EagerParameterServerOptions,
    ) -> None:
        self._served = ServedGradients(neighbours, make_optimizer, options.servers or 1)
        self._neighbours = neighbours
        self._options = options
        self._pull_calls, self._push_calls = neighbours.caller(), neighbours.caller()
        self._pulls = ThreadPoolExecutor(1, "pipeplan-pull")
        self._pushes = ThreadPoolExecutor(1, "pipeplan-push")
        self._pulling: Future[_Pulled] | None = None
        self._pushing: Future[None] | None = None
        self._used: dict[int, int] = {}
        self._newest: dict[int, int] = {}

    def begin(self, step: int) -> None:
        """Pull the next iteration's weights while this one is computed."""
        self.reduced = True
        if self._pulling is None:
            self._pulling = self._pulls.submit(self._pull)

    def update(self, step: int, optimise: Optimise) -> StepOutcome:
        """Push this iteration's gradients, and go on with the weights that were pulled."""
        pulled: _Pulled = {}
        if self._pulling is not None and self._pulling.done():
            pulled, self._pulling = self._pulling.result(), None
        outcome = optimise()
        if self._pushing is not None:
            self._pushing.result()
        for index, (version, _) in pulled.items():
            self._see(index, version)
        if not outcome.skipped:
            self._push_gradients()
        self._take(pulled)
        return outcome

    def settle(self) -> None:
        """Wait for the last push, and take the weights it led to."""
        if self._pushing is not None:
            self._pushing.result()
        if self._pulling is not None:
            self._pulling.result()
        self._pulling = None
        self._take(self._pulls.submit(self._pull).result())

    def _push_gradients(self) -> None:
        rows = []
        for index, part in self._served.parts():
            count = len(self._neighbours.there)
            newer = max(0, self._newest.get(index, 0) - self._used.get(index, 0))
            rates = self._served.rates(self._options.factor(newer, count) / count)
            header = {"rates": rates, "pull": False}
            gradients = [gradient.clone() for gradient in self._served.gradients(part)]
            rows.append((index, header, gradients))
        self._pushing = self._pushes.submit(self._push, rows)

    def _push(self, rows: list[tuple[int, Header, list[Tensor]]]) -> None:
        for index, header, gradients in rows:
            try:
                calls = self._push_calls
                answer, _ = self._served.call(calls, index, "push", header, gradients)
                self._see(index, int(answer["version"]))
            except CallError:
                self.reduced = False

    def _see(self, index: int, version: int) -> None:
        """Note a part's version, which falls only where another server has taken the part over.

        While a push is under way only its thread calls this.
        """
        if version < self._used.get(index, 0):
            self._newest[index] = version
        else:
            self._newest[index] = max(self._newest.get(index, 0), version)

    def _pull(self) -> _Pulled:
        found = {}
        for index, _ in self._served.parts():
            with suppress(CallError):
                answer, weights = self._served.call(self._pull_calls, index, "pull", {})
                found[index] = int(answer["version"]), weights
        return found

    def _take(self, pulled: _Pulled) -> None:
        for index, (version, weights) in pulled.items():
            self._served.set_weights(index, weights)
            self._used[index] = version
        self._neighbours.weights.put_back()
