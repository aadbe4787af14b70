"""The gradients that ranks share: when each is complete, and the buckets they are summed in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from executor.distributed.failure import talking_to
from executor.stage.gradient_types import gradient_type
from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.plan.programs import Reduce

Announce = Callable[[str], None]


def last_backwards(
    order: Sequence[Operation], users: Mapping[str, Iterable[int]]
) -> dict[Operation, list[str]]:
    """Return the parameters by the last operation of a rank that adds to their gradients.

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


class GradientReadiness:
    """Announces each parameter's gradient within the operation that adds the last part to it.

    How many parts an operation adds depends on the graph: recomputed pieces that share a parameter
    add one each, split backwards one for each use. The graph is the same in every iteration, so
    the first one counts and announces when the operation ends; from the second on a gradient is
    announced with its last part.

    Args:
        parameters: those to be announced, by name.
        last: their last operations, of :func:`last_backwards`; a parameter of none gets no
            gradient here.
        announce: called with the name of each.
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
        """Announce the parameters that get no gradient on this rank."""
        for name in self._without:
            self._announce(name)

    def before(self, operation: Operation) -> None:
        """Watch the gradients that get their last part in an operation."""
        self._seen.clear()
        self._now = frozenset(self._last.get(operation, ()))
        for name in self._last.get(operation, ()):
            hook = partial(self._added, name)
            parameter = self._parameters[name]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            if self._expected.get(name) == 0:
                self._announce(name)

    def added(self, parameter: Tensor) -> None:
        """Count a part that something other than autograd has added to a gradient."""
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

    def after(self, operation: Operation) -> None:
        """Announce the gradients that have not been announced within the operation."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for name in self._last.get(operation, ()):
            if self._seen[name] != self._expected.get(name):
                self._announce(name)
            self._expected.setdefault(name, self._seen[name])
        self._now = frozenset()


MIB = 2**20


@dataclass(frozen=True)
class SharedGradients:
    """The gradients that one reduction sums on this rank.

    Attributes:
        reduce: the reduction.
        parameters: by name, in the order in which a backward completes their gradients.
    """

    reduce: Reduce
    parameters: Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Bucket:
    """Gradients of one type that the same ranks reduce at once.

    Attributes:
        parameters: by name, in the order in which a backward completes their gradients.
        reduces: the reductions that the parameters belong to, all of the same ranks, with the names
            of those of each.
    """

    parameters: Mapping[str, nn.Parameter]
    reduces: Mapping[Reduce, tuple[str, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that reduce it."""
        return next(iter(self.reduces)).ranks

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return next(iter(self.parameters.values())).device

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the place of each parameter, by name, in a flat tensor of them all, or more."""
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        parts = torch.split(flat, [*sizes, flat.numel() - sum(sizes)])
        rows = zip(self.parameters.items(), parts, strict=False)
        return {name: part.view(parameter.shape) for (name, parameter), part in rows}

    @property
    def partners(self) -> str:
        """The partners' name in messages about lost ranks."""
        stages = sorted({stage for reduce in self.reduces for stage in reduce.stages})
        told = (", ".join(map(str, row)) for row in (self.ranks, stages))
        return "ranks {}, which sum the gradients of stages {}".format(*told)


class BucketSum:
    """A bucket's gradients, one after the other in a flat tensor, and their sum over its ranks.

    Backwards add into views of the tensor and the sum changes it in place, without a copy. A rank
    without a microbatch adds zeros.

    Args:
        bucket: whose gradients it holds.
        group: of its ranks.
        multiple: the tensor is filled up with zeros to a multiple of so many elements.
    """

    def __init__(self, bucket: Bucket, group: Any, multiple: int = 1) -> None:
        parameters = list(bucket.parameters.values())
        total = sum(parameter.numel() for parameter in parameters)
        length, like = math.ceil(total / multiple) * multiple, parameters[0]
        self.bucket = bucket
        self.flat = torch.zeros(length, dtype=gradient_type(like), device=like.device)
        self.views = bucket.views(self.flat)
        self.group = group
        self._end: Callable[[], object] = lambda: None

    def attach(self) -> None:
        """The parameters' gradients are those in the tensor."""
        for name, parameter in self.bucket.parameters.items():
            parameter.grad = self.views[name]

    def clear(self) -> None:
        """All gradients are zero, and those in the tensor."""
        self.flat.zero_()
        self.attach()

    def start(self) -> None:
        """Start to sum the gradients over the ranks."""
        self.begin(lambda: dist.all_reduce(self.flat, group=self.group, async_op=True).wait)

    def begin(self, communicate: Callable[[], Callable[[], object]]) -> None:
        """Start to communicate with the ranks; what is returned waits for the end."""
        with talking_to(self.bucket.partners):
            self._end = communicate()

    def wait(self) -> None:
        """Wait for what was started last."""
        with talking_to(self.bucket.partners):
            self._end()


def buckets_of(
    shared: Sequence[SharedGradients], mib: float, *, over_reductions: bool = False
) -> list[Bucket]:
    """Return buckets of gradients in their order, each of one type.

    Buckets are in the order of their last gradients. All ranks have one order of reductions, so
    any two buckets are in one order on all ranks that have both.

    Args:
        shared: gradients, in the order in which backwards complete them.
        mib: the most MiB of a bucket of more than one gradient.
        over_reductions: whether a bucket may hold gradients of several reductions of the same
            ranks; else it is of one.
    """
    filling: dict[Hashable, list[tuple[int, Reduce, str, nn.Parameter]]] = {}
    full, bytes_ = [], Counter[Hashable]()
    gradients = ((row.reduce, *item) for row in shared for item in row.parameters.items())
    for place, (reduce, name, parameter) in enumerate(gradients):
        kind = (reduce.ranks if over_reductions else reduce, parameter.dtype)
        added = parameter.numel() * gradient_type(parameter).itemsize
        if kind in filling and bytes_[kind] + added > mib * MIB:
            full.append(filling.pop(kind))
            bytes_[kind] = 0
        filling.setdefault(kind, []).append((place, reduce, name, parameter))
        bytes_[kind] += added
    found = []
    for rows in sorted([*full, *filling.values()], key=lambda rows: rows[-1][0]):
        names: dict[Reduce, tuple[str, ...]] = {}
        for _, reduce, name, _ in rows:
            names[reduce] = (*names.get(reduce, ()), name)
        found.append(Bucket({name: parameter for _, _, name, parameter in rows}, names))
    return found
