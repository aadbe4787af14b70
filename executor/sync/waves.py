"""Wave-synchronous parallelism: HetPipe's parameter server (Park et al., ATC 2020, section 5).

A pipeline is a virtual worker, and a wave the microbatches of one of its work units. HetPipe's own
pipelines go on to the next wave before the last one has left them; these flush between waves.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.elastic.neighbours import Neighbours
from executor.elastic.tensor_calls import CallError, Header
from executor.sync.parameter_server import ServedWeights
from executor.sync.protocol import DecentralizedStrategy, Optimise
from executor.training.optimisation import StepOutcome
from planner.errors import PipeplanError
from planner.sync.groups.waves import WaveChanges


class WaveShard:
    """The parameters one server keeps: what they were, and the sum of what waves have changed.

    Args:
        parameters: by name; copied.
        distance: of waves, from 0.
    """

    def __init__(self, parameters: Mapping[str, Tensor], distance: int) -> None:
        self._weights = [p.detach().cpu().clone() for p in parameters.values()]
        self._changes = WaveChanges[list[Tensor]](distance)
        self._lock = threading.Lock()

    def push(
        self, header: Header, pushed: list[Tensor], patience_s: float
    ) -> tuple[Header, list[Tensor]]:
        """Add what a wave has changed.

        Args:
            header: ``wave`` and ``pipeline``.
            pushed: the changes.
            patience_s: nobody is waited for here.
        """
        if [tensor.shape for tensor in pushed] != [tensor.shape for tensor in self._weights]:
            raise PipeplanError("changes of other shapes; start all pipelines with one plan")
        with self._lock:
            self._add(self._changes.push(int(header["wave"]), int(header["pipeline"]), pushed))
        return {}, []

    def pull(self, header: Header) -> tuple[Header, list[Tensor]]:
        """Return the weights and, by pipeline, the last wave that they include.

        Args:
            header: ``wave`` after which they are pulled; without it, they include everything.
        """
        with self._lock:
            self._add(self._changes.pull(int(header["wave"]) if "wave" in header else None))
            included = sorted(self._changes.included.items())
            return {"included": included}, [w.clone() for w in self._weights]

    @torch.no_grad()
    def _add(self, rows: Sequence[Sequence[Tensor]]) -> None:
        for changes in rows:
            for weight, change in zip(self._weights, changes, strict=True):
                weight.add_(change)


@dataclass
class _Exchange:
    """What came of the exchange after a wave.

    Attributes:
        succeeded: whether the servers were reached.
        pulled: weights by part; empty where nothing had to be pulled.
        includes: the slowest pipeline's last wave in what was pulled.
    """

    succeeded: bool = True
    pulled: dict[int, list[Tensor]] = field(default_factory=dict)
    includes: int = 0


class WaveSynchronous(DecentralizedStrategy):
    """After each wave a pipeline pushes what it changed, and goes on unless others are far behind.

    The pipeline's own optimizer steps, at its learning rate over the number of pipelines: that
    change is in the pipeline's own weights at once, and servers add it to theirs. A pipeline may
    begin wave ``c + 1`` on weights that have the changes of all pipelines up to wave ``c -
    distance``. Where its weights lack some of them it waits until all have pushed these, and pulls;
    otherwise it computes on, and the push goes on behind its computation. Momentum and Adam's
    moments are each pipeline's own, so that with distance 0 only optimizers whose steps are linear
    in the gradients (SGD, with momentum and weight decay) train as one process does.

    While the coordinator is away pipelines go on by themselves, farther apart if need be.

    Args:
        neighbours: at this rank's place.
        distance: of waves, from 0.
        servers: how many pipelines serve.
    """

    def __init__(self, neighbours: Neighbours, distance: int, servers: int = 1) -> None:
        self._served = ServedWeights(neighbours, self._make_shard, servers)
        self._neighbours = neighbours
        self._distance = distance
        self._calls = neighbours.caller()
        self._pool = ThreadPoolExecutor(1, "pipeplan-wave")
        self._under_way: Future[_Exchange] | None = None
        self._includes = 0
        # Failures are told with the next request for a group, not with that for a share.
        self._last_succeeded = True

    @torch.no_grad()
    def update(self, step: int, optimise: Optimise) -> StepOutcome:
        """Step, push what it changed, and wait for others if the distance demands it."""
        self._end_exchange()
        masters = self._served.masters
        before = {name: master.detach().clone() for name, master in masters.items()}
        # Servers have none of this wave yet: its changes come with its push.
        self._served.serve_from(before)
        with torch.enable_grad():
            outcome = optimise()
        share = 1 / max(1, len(self._neighbours.there))
        changes = {name: (m.detach() - before[name]).mul_(share) for name, m in masters.items()}
        for name, master in masters.items():
            master.copy_(before[name] + changes[name])
        self._neighbours.weights.put_back()
        lacks = self._includes < step - self._distance
        self._under_way = self._pool.submit(
            self._exchange, step, changes, self._last_succeeded, lacks
        )
        if lacks:
            self._end_exchange()
        return outcome

    def settle(self) -> None:
        """Wait for the last push, and take the servers' weights."""
        self._end_exchange()
        self._take(self._pool.submit(self._pull, {}).result())

    def reload(self) -> None:
        """The servers' weights are pulled after the first wave."""
        self._includes = 0

    def _make_shard(self, _: int, mine: Mapping[str, Tensor]) -> WaveShard:
        return WaveShard(mine, self._distance)

    def _exchange(
        self, wave: int, changes: Mapping[str, Tensor], succeeded: bool, lacks: bool
    ) -> _Exchange:
        """Push a wave's changes, say so, and pull once the slowest is near; on the other thread."""
        header: Header = {"wave": wave, "pipeline": self._neighbours.pipeline}
        pushed = True
        for index, part in self._served.parts():
            try:
                self._served.call(self._calls, index, "push", header, [changes[n] for n in part])
            except CallError:
                pushed = False
        self._served.serve_from({})
        self._neighbours.ask(wave, succeeded)
        found = self._pull({"wave": wave}) if lacks else _Exchange()
        found.succeeded = found.succeeded and pushed
        return found

    def _pull(self, header: Header) -> _Exchange:
        found = _Exchange()
        includes = []
        for index, _ in self._served.parts():
            try:
                answer, weights = self._served.call(self._calls, index, "pull", header)
            except CallError:
                found.succeeded = False
                continue
            found.pulled[index] = weights
            included = dict(answer["included"])
            includes.append(min(included.get(n, 0) for n in self._neighbours.there))
        found.includes = min(includes, default=0) if found.succeeded else 0
        return found

    def _end_exchange(self) -> None:
        """Wait for what is under way, and compute on what was pulled."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            exchange = under_way.result()
            self._last_succeeded = exchange.succeeded
            self._take(exchange)

    def _take(self, exchange: _Exchange) -> None:
        if exchange.pulled:
            for index, weights in exchange.pulled.items():
                self._served.set_weights(index, weights)
            self._includes = exchange.includes
            self._neighbours.weights.put_back()
