"""Models that are built with the memory of some of their parameters alone.

A rank needs the weights of its own stages, with the values that they have in the whole model. What
a constructor draws for one parameter depends on all that it drew before, often on the values drawn
(``trunc_normal_`` draws again what is too large), so it has to run as a whole. But the memory of a
parameter that the rank does not need can go as soon as the constructor turns to another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from executor.training.data import GlobalGenerators
from planner.errors import PipeplanError
from planner.model.tracing.torch_private import (
    TorchDispatchMode,
    packet_of,
    schema_arguments,
    storage_key,
    tree_leaves,
)

logger = logging.getLogger(__name__)


class SpoiledError(Exception):
    """Something needed was computed from a parameter whose values were gone.

    Attributes:
        numbers: of those parameters, in the order in which the model registers its parameters.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        super().__init__(numbers)
        self.numbers = frozenset(numbers)


Needed = Callable[[str], bool]
"""Whether the parameter of a name (FQN) is needed."""


def build_partially(make: Callable[[], nn.Module], seed: int, is_needed: Needed) -> nn.Module:
    """Build a model of which some parameters have their values.

    The others have memory that nothing has been written to, which the system does not provide
    before something is. Buffers and other tensors have their values.

    Args:
        make: builds the model; called on the meta device first.
        seed: of torch's generator.
        is_needed: which parameters are.
    """
    before = GlobalGenerators.now()
    try:
        kept, count = _registered(make, is_needed)
        for _ in range(2):
            before.restore()
            try:
                return _built(make, seed, kept, count, is_needed)
            except SpoiledError as error:
                kept |= error.numbers
    except _UNREADABLE:
        pass  # What is wrong with the model itself, building all of it tells.
    logger.warning(
        "the initial values of this model's parameters depend on one another: this rank takes the "
        "memory of all of them while it builds the model"
    )
    before.restore()
    torch.manual_seed(seed)
    return make()


_UNREADABLE = (PipeplanError, RuntimeError, NotImplementedError)
"""What a constructor that reads values raises on the meta device, which has none."""


def _registered(make: Callable[[], nn.Module], is_needed: Needed) -> tuple[frozenset[int], int]:
    """Return the numbers of the parameters that are needed, and how many are registered."""
    registered = _Registered()
    with torch.device("meta"), registered:
        return registered.numbers_of(make(), is_needed), len(registered.parameters)


def _built(
    make: Callable[[], nn.Module], seed: int, kept: frozenset[int], count: int, is_needed: Needed
) -> nn.Module:
    """Build it with the parameters of these numbers.

    Raises:
        SpoiledError: if a parameter that is needed has not got the value of the whole model.
    """
    torch.manual_seed(seed)
    memory = _Memory(kept)
    with memory.of_parameters():
        model = make()
    memory.give_back()
    pairs = model.named_parameters(remove_duplicate=False)
    wrong = any(is_needed(name) and memory.is_gone(parameter) for name, parameter in pairs)
    if wrong or memory.registered != count:
        raise SpoiledError(memory.read_when_gone)
    return model


class _Registered:
    """Notes the parameters that modules register, in order."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    def __enter__(self) -> None:
        self._hook = register_module_parameter_registration_hook(self._note)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _note(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self.parameters.append(parameter)

    def numbers_of(self, model: nn.Module, is_needed: Needed) -> frozenset[int]:
        """Return the numbers of the model's parameters that are needed."""
        pairs = model.named_parameters(remove_duplicate=False)
        wanted = {id(parameter) for name, parameter in pairs if is_needed(name)}
        return frozenset(k for k, p in enumerate(self.parameters) if id(p) in wanted)


_FILLS = frozenset("normal_ uniform_ zero_ fill_ copy_ random_ bernoulli_ exponential_".split())
"""Operators that write all of their first argument, whatever it was before."""
_READS = frozenset(["_local_scalar_dense", "equal", "is_nonzero"])
"""Operators that hand values to the constructor, which may decide by them."""


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the memory of parameters that are not needed.

    Args:
        kept: numbers of the parameters that are, in the order of registration.

    Attributes:
        registered: how many parameters have been registered.
        read_when_gone: numbers of parameters whose values were read after they were gone.
    """

    def __init__(self, kept: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.registered = 0
        self.read_when_gone: set[int] = set()
        self._kept = kept
        # By the keys of storages: the number of each parameter; memory that may be taken, with its
        # size; what of that has its values now.
        self._numbers: dict[int, int] = {}
        self._spare: dict[int, tuple[Any, int]] = {}
        self._there: set[int] = set()
        # Storages that must not be mistaken for others of the same address.
        self._alive: list[Any] = []

    @contextmanager
    def of_parameters(self) -> Iterator[None]:
        """Take memory while a model is built inside."""
        hook = register_module_parameter_registration_hook(self._register)
        try:
            with self:
                yield
        finally:
            hook.remove()

    def give_back(self) -> None:
        """Give everything memory again, whose pages nobody has touched."""
        for storage, bytes_ in self._spare.values():
            storage.resize_(bytes_)

    def is_gone(self, parameter: Tensor) -> bool:
        """Return whether a parameter's memory was taken."""
        return storage_key(parameter) in self._spare

    def _register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None:
            return
        key = storage_key(parameter)
        self._turn_to({key})
        self._alive.append(parameter.untyped_storage())
        self._numbers.setdefault(key, self.registered)
        if self.registered not in self._kept and key not in self._spare:
            self._may_take(parameter)
            self._there.add(key)
        self.registered += 1

    def _may_take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._spare[storage_key(tensor)] = storage, storage.nbytes()

    def _turn_to(self, keys: Collection[int]) -> None:
        """Take the memory of all but these."""
        for key in self._there.difference(keys):
            self._spare[key][0].resize_(0)
            self._there.remove(key)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {storage_key(tensor) for tensor in _tensors((args, kwargs))}
        if given & self._numbers.keys():
            self._turn_to(given)
        gone = (given & self._spare.keys()) - self._there
        for key in gone:
            storage, bytes_ = self._spare[key]
            storage.resize_(bytes_)
        results = function(*args, **kwargs)
        if gone:
            self._after(function, args, kwargs, results, gone)
        return results

    def _after(self, function: Any, args: Any, kwargs: Any, results: Any, gone: set[int]) -> None:
        """Values were gone that an operator was given: so are its results, or it has set them."""
        name = packet_of(function).__name__
        first = {storage_key(tensor) for tensor in _tensors(args[:1])}
        others = {storage_key(tensor) for tensor in _tensors((args[1:], kwargs))}
        if name in _FILLS and not gone & others and _is_whole(args[0]):
            self._there |= first
            return
        made = [t for t in _tensors(results) if storage_key(t) not in gone]
        made += [t for t in _written(function, args, kwargs) if storage_key(t) not in gone]
        if made or name in _READS:
            self.read_when_gone |= {self._numbers[key] for key in gone if key in self._numbers}
        if name in _READS:
            raise SpoiledError(self.read_when_gone)
        for tensor in made:
            if storage_key(tensor) not in self._spare:
                self._alive.append(tensor.untyped_storage())
                self._may_take(tensor)
        for key in {*gone, *map(storage_key, made)}:
            self._spare[key][0].resize_(0)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _tensors(value: object) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _written(function: Any, args: Any, kwargs: Any) -> Iterable[Tensor]:
    for position, argument in enumerate(schema_arguments(function)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name)
            yield from _tensors(args[position] if position < len(args) else given)
