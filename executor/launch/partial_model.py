"""Models that are built with the memory of some of their parameters alone.

A rank needs the weights of its own stages, with the values that they have in the whole model. What
a constructor draws for one parameter depends on all that it drew before, so it runs as a whole.
A first run on the meta device tells which parameters the needed ones are computed from; in a
second run all the others share one piece of memory, into which their values are drawn in turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from executor.stage.random_numbers import own_draws, seed_draws
from planner.errors import PipeplanError
from planner.tracing.torch_private import (
    TorchDispatchMode,
    packet_of,
    schema_arguments,
    storage_key,
    tree_leaves,
)

logger = logging.getLogger(__name__)
Needed = Callable[[str], bool]
"""Whether the parameter of a name (FQN) is needed."""
Make = Callable[[], nn.Module]
_UNREADABLE = (PipeplanError, RuntimeError, NotImplementedError)
"""What a constructor that reads values raises on the meta device, which has none."""
_FILLS = frozenset("normal_ uniform_ zero_ fill_ copy_ random_ bernoulli_ exponential_".split())
"""Operators that write all of their first argument, whatever it was before."""


def build_partially(
    make: Make, seed: int, is_needed: Needed, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build a model with the values of some parameters, and of all buffers and other tensors.

    Other parameters have memory that nothing has been written to, which the system does not provide
    before something is. Numpy's and Python's generators are afterwards as they were, torch's as the
    model leaves it.

    Args:
        make: builds the model; called on the meta device first.
        seed: of the global generators of torch, numpy and Python's ``random``.
        is_needed: which parameters are.
        dtype: that the model is converted to; None: it stays as it is.
    """

    def seeded() -> nn.Module:
        torch.manual_seed(seed)  # Accelerators' generators too.
        seed_draws(seed)
        return make()

    with own_draws():
        model = _converted(_with_needed(seeded, is_needed), is_needed, dtype)
        drawn = torch.get_rng_state()
    torch.set_rng_state(drawn)
    return model


def _with_needed(make: Make, is_needed: Needed) -> nn.Module:
    try:
        expected, kept = _registered_and_kept(make, is_needed)
        memory = _SharedMemory(expected, kept)
        with _registrations(memory.register):
            model = make()
        if memory.registered == expected:
            return model
    except _UNREADABLE:
        pass  # What is wrong with the model itself, building all of it tells.
    logger.warning(
        "the initial values of this model's parameters depend on one another: this rank takes the "
        "memory of all of them while it builds the model"
    )
    return make()


Form = tuple[torch.Size, torch.dtype]


def _registered_and_kept(make: Make, is_needed: Needed) -> tuple[list[Form], frozenset[int]]:
    """Return the forms of the parameters that modules register, in order, and numbers of some.

    These are the parameters that the needed ones, the buffers and other tensors are computed from.
    """
    parameters: list[nn.Parameter] = []
    origins = _Origins()
    with torch.device("meta"), _registrations(parameters.append), origins:
        model = make()
    wanted: list[Tensor] = [
        p for name, p in model.named_parameters(remove_duplicate=False) if is_needed(name)
    ]
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name != "_parameters"}
        wanted += _tensors(own)  # Buffers among them.
    kept = origins.of(wanted)
    numbers = (number for number, p in enumerate(parameters) if storage_key(p) in kept)
    return [(p.shape, p.dtype) for p in parameters], frozenset(numbers)


@contextmanager
def _registrations(note: Callable[[nn.Parameter], object]) -> Iterator[None]:
    """Call a function with each parameter that a module registers inside."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            note(parameter)

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which memory the contents of other memory are computed from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = nx.DiGraph()
        # Memory that must not be mistaken for other memory of the same address.
        self._alive: list[Any] = []

    def of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the keys of the memory of tensors, and of all that they are computed from."""
        known = {storage_key(tensor) for tensor in tensors}
        found = (nx.ancestors(self._read, key) for key in known if key in self._read)
        return known.union(*found)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        results = function(*args, **kwargs)
        fills = packet_of(function).__name__ in _FILLS and _is_whole(args[0])
        read = [*_tensors((args[1:] if fills else args, kwargs))]
        written = [*_tensors(results), *_written(function, args, kwargs)]
        self._alive += [tensor.untyped_storage() for tensor in (*read, *written)]
        pairs = ((storage_key(one), storage_key(other)) for one in read for other in written)
        self._read.add_edges_from(pairs)
        return results


class _SharedMemory:
    """Memory in which parameters lie that nobody needs, one over the other.

    Args:
        expected: forms of all parameters in the order of registration, for the size.
        kept: numbers of the parameters that keep their own.
    """

    def __init__(self, expected: Sequence[Form], kept: frozenset[int]) -> None:
        self.registered: list[Form] = []
        self._kept = kept
        others = [form for number, form in enumerate(expected) if number not in kept]
        self._most = max((shape.numel() for shape, _ in others), default=0)
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def register(self, parameter: nn.Parameter) -> None:
        """Let a parameter lie in the shared memory, unless it is kept."""
        number, key = len(self.registered), (parameter.dtype, parameter.device)
        self.registered.append((parameter.shape, parameter.dtype))
        keeps = number in self._kept or parameter.is_meta or parameter.numel() > self._most
        if keeps or not _is_whole(parameter):
            return
        if key not in self._memory:
            self._memory[key] = torch.empty(self._most, dtype=key[0], device=key[1])
        size, stride = parameter.size(), parameter.stride()
        parameter.data = self._memory[key]  # Its own goes before anything else is made.
        parameter.data = self._memory[key].as_strided(size, stride)


def _converted(model: nn.Module, is_needed: Needed, dtype: torch.dtype | None) -> nn.Module:
    """Convert a model; give parameters that are not needed memory whose pages nobody touches."""
    named = [*model.named_parameters(remove_duplicate=False)]
    needed = {id(parameter) for name, parameter in named if is_needed(name)}
    others = {id(p): (p, p.size(), p.stride()) for _, p in named if id(p) not in needed}
    for parameter, *_ in others.values():
        parameter.data = parameter.data.new_empty(0)
    if dtype is not None:
        model.to(dtype)
    for parameter, size, stride in others.values():
        parameter.data = torch.empty_strided(size, stride, dtype=parameter.dtype)
    return model


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _tensors(value: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for position, argument in enumerate(schema_arguments(function)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name)
            yield from _tensors(args[position] if position < len(args) else given)
