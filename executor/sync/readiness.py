"""When the gradient of a parameter has got the last of an iteration that this rank adds to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from executor.worker import Worker
from planner.artifacts.operations import Operation
from planner.errors import PipeplanError

Announce = Callable[[str], None]


def last_backwards(
    order: Sequence[Operation], users: Mapping[str, Iterable[int]]
) -> dict[Operation, list[str]]:
    """The parameters by the last operation of a rank's order that adds to their gradients.

    Args:
        order: of the rank.
        users: by name, the stages that use the parameter.
    """
    last = {op.stage: op for op in order if op.kind in "BW"}
    place = {op: k for k, op in enumerate(order)}
    found: dict[Operation, list[str]] = {}
    for name, stages in users.items():
        candidates = [last[stage] for stage in stages if stage in last]
        if candidates:
            found.setdefault(max(candidates, key=place.__getitem__), []).append(name)
    return found


class Readiness:
    """Announces each parameter's gradient within the operation that adds the last part to it.

    How many parts an operation adds depends on the graph: recomputed pieces that share a parameter
    add one each, split backwards one for each use. The graph is the same in every iteration, so
    the first one counts and announces when the operation ends; from the second on a gradient is
    announced with its last part.

    Args:
        parameters: those to be announced, by name.
        last: their last operations, of :func:`last_backwards`; a parameter of none gets no
            gradient here.
        announce: told the name of each.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        last: Mapping[Operation, Sequence[str]],
        announce: Announce,
    ) -> None:
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._last = last
        self._announce = announce
        with_last = {name for names in last.values() for name in names}
        self._without = [name for name in parameters if name not in with_last]
        self._expected: dict[str, int] = {}
        self._seen: Counter[str] = Counter()
        self._now: frozenset[str] = frozenset()
        self._hooks: list[RemovableHandle] = []

    def begin_iteration(self) -> None:
        """What gets no gradient on this rank is complete."""
        for name in self._without:
            self._announce(name)

    def begin(self, operation: Operation) -> None:
        """A backward or weight gradient is about to run."""
        self._seen.clear()
        self._now = frozenset(self._last.get(operation, ()))
        for name in self._last.get(operation, ()):
            hook = partial(self._added, name)
            parameter = self._parameters[name]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            if self._expected.get(name) == 0:
                self._announce(name)

    def added(self, parameter: Tensor) -> None:
        """Something other than autograd has added to a gradient."""
        name = self._names.get(id(parameter))
        if name in self._now and name is not None:
            self._added(name)

    def _added(self, name: str, parameter: Tensor | None = None) -> None:
        self._seen[name] += 1
        expected = self._expected.get(name)
        if expected is not None and self._seen[name] > expected:
            raise PipeplanError(
                f"the gradient of {name!r} came in more parts than in the first iteration, after "
                "its sum over the ranks had begun: the model's graph changes; train with sync "
                "all_reduce:overlap=false"
            )
        if self._seen[name] == expected:
            self._announce(name)

    def end(self, operation: Operation) -> None:
        """It has run."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for name in self._last.get(operation, ()):
            if self._seen[name] != self._expected.get(name):
                self._announce(name)
            self._expected.setdefault(name, self._seen[name])
        self._now = frozenset()


class AnnouncingWorker:
    """A stage that tells which of its operations runs.

    Args:
        worker: the stage.
        index: its number.
        split: the microbatches whose backward runs in two halves.
        readiness: told.
    """

    def __init__(
        self, worker: Worker, index: int, split: Iterable[int], readiness: Readiness
    ) -> None:
        self._worker = worker
        self._index = index
        self._split = frozenset(split)
        self._readiness = readiness
        self.is_last = worker.is_last
        self.incoming = worker.incoming
        self.returning = worker.returning

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors for the next stage, or the loss."""
        return self._worker.forward(microbatch, received)

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients for the stage before."""
        if microbatch in self._split:
            return self._worker.backward(microbatch, gradients)
        operation = Operation(self._index, "B", microbatch)
        self._readiness.begin(operation)
        results = self._worker.backward(microbatch, gradients)
        self._readiness.end(operation)
        return results

    def weight_gradients(self, microbatch: int) -> None:
        """The second half of a split backward."""
        operation = Operation(self._index, "W", microbatch)
        self._readiness.begin(operation)
        self._worker.weight_gradients(microbatch)
        self._readiness.end(operation)

    def require_empty(self) -> None:
        """Every microbatch of the iteration is through."""
        self._worker.require_empty()
