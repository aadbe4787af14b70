"""Models that are built with the memory of some of their parameters alone.

A rank needs the weights of its own stages, with the values that they have in the whole model. What
a constructor draws for one parameter depends on all that it drew before, often on the values drawn
(``trunc_normal_`` draws again what is too large), so it has to run as a whole. But the memory of a
parameter that the rank does not need can go as soon as the constructor turns to another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from executor.distributed.member_group import MemberShare
from executor.training.data import GlobalGenerators, seed_draws
from planner.errors import PipeplanError
from planner.tracing.torch_private import (
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


@dataclass(frozen=True)
class PartialModel:
    """A model of which some parameters have their values.

    The others have memory that nothing has been written to, which the system does not provide
    before something is. Buffers and other tensors have their values.

    Attributes:
        model: the model.
        shares: of parameters that have no values, the shares that were asked for, by name.
    """

    model: nn.Module
    shares: Mapping[str, Tensor]


def build_partially(
    make: Callable[[], nn.Module],
    seed: int,
    is_needed: Needed,
    shares: Mapping[str, MemberShare] | None = None,
) -> PartialModel:
    """Build a model with the values of some parameters.

    Numpy's and Python's generators are afterwards as they were, torch's as the model leaves it.

    Args:
        make: builds the model; called on the meta device first.
        seed: of the global generators of torch, numpy and Python's ``random``.
        is_needed: which parameters are.
        shares: of needed parameters, by name, those of which a part is enough.
    """
    needed = {name: share for name, share in (shares or {}).items() if is_needed(name)}

    def seeded() -> nn.Module:
        torch.manual_seed(seed)  # Accelerators' generators too.
        seed_draws(seed)
        return make()

    before = GlobalGenerators.now()
    try:
        return _with_needed(seeded, is_needed, needed)
    finally:
        replace(before, torch_state=torch.get_rng_state()).restore()


def _with_needed(
    make: Callable[[], nn.Module], is_needed: Needed, needed: Mapping[str, MemberShare]
) -> PartialModel:
    """Build it without the memory of what is not needed, if its constructor allows that."""
    try:
        registered = _registered(make)
        kept, parts = registered.kept(is_needed, needed)
        for _ in range(2):
            try:
                memory = _Memory(kept, parts)
                return _built(make, memory, registered.count, is_needed, needed)
            except SpoiledError as error:
                kept |= error.numbers
                parts = {number: share for number, share in parts.items() if number not in kept}
    except _UNREADABLE:
        pass  # What is wrong with the model itself, building all of it tells.
    logger.warning(
        "the initial values of this model's parameters depend on one another: this rank takes the "
        "memory of all of them while it builds the model"
    )
    return PartialModel(make(), {})


_UNREADABLE = (PipeplanError, RuntimeError, NotImplementedError)
"""What a constructor that reads values raises on the meta device, which has none."""


def _registered(make: Callable[[], nn.Module]) -> _Registered:
    """Return the parameters that a model registers."""
    registered = _Registered()
    with torch.device("meta"), registered:
        registered.model = make()
    return registered


def _built(
    make: Callable[[], nn.Module],
    memory: _Memory,
    count: int,
    is_needed: Needed,
    shares: Collection[str],
) -> PartialModel:
    """Build it with the parameters that the memory keeps.

    Raises:
        SpoiledError: if a parameter that is needed has not got the value of the whole model.
    """
    with memory.of_parameters():
        model = make()
    memory.give_back()
    pairs = model.named_parameters(remove_duplicate=False)
    wrong = any(
        is_needed(name) and memory.is_gone(p) and memory.share_of(p) is None for name, p in pairs
    )
    if wrong or memory.registered != count:
        raise SpoiledError(memory.read_when_gone | memory.lost)
    found = {name: memory.share_of(p) for name, p in model.named_parameters() if name in shares}
    return PartialModel(model, {name: part for name, part in found.items() if part is not None})


class _Registered:
    """Notes the parameters that modules register, in order.

    Attributes:
        model: that registered them.
    """

    model: nn.Module

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    @property
    def count(self) -> int:
        """How many were registered; a tied one counts each time."""
        return len(self.parameters)

    def __enter__(self) -> None:
        self._hook = register_module_parameter_registration_hook(self._note)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _note(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self.parameters.append(parameter)

    def kept(
        self, is_needed: Needed, shares: Mapping[str, MemberShare]
    ) -> tuple[frozenset[int], dict[int, MemberShare]]:
        """Return the numbers of the parameters that are needed whole, and shares of others."""
        named = [*self.model.named_parameters(remove_duplicate=False)]
        parts = {id(parameter): shares[name] for name, parameter in named if name in shares}
        wanted = {id(parameter) for name, parameter in named if is_needed(name)} - parts.keys()
        numbered = [*enumerate(self.parameters)]
        return (
            frozenset(number for number, p in numbered if id(p) in wanted),
            {number: parts[id(p)] for number, p in numbered if id(p) in parts},
        )


_FILLS = frozenset("normal_ uniform_ zero_ fill_ copy_ random_ bernoulli_ exponential_".split())
"""Operators that write all of their first argument, whatever it was before."""
_READS = frozenset(["_local_scalar_dense", "equal", "is_nonzero"])
"""Operators that hand values to the constructor, which may decide by them."""


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the memory of parameters that are not needed.

    Args:
        kept: numbers of the parameters that are, in the order of registration.
        shares: of others, the parts that are copied before their memory is taken, by number.

    Attributes:
        registered: how many parameters have been registered.
        read_when_gone: numbers of parameters whose values were read after they were gone.
        lost: numbers of parameters with a share, into which something was written after they were
            gone.
    """

    def __init__(self, kept: frozenset[int], shares: Mapping[int, MemberShare]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.registered = 0
        self.read_when_gone: set[int] = set()
        self.lost: set[int] = set()
        self._kept = kept
        self._shares = shares
        self._parts: dict[int, Tensor] = {}  # Copied so far, by number.
        self._shared: dict[int, tuple[int, Tensor]] = {}  # Number and tensor by storage.
        self._copies = False
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
        for key in self._there & self._shared.keys():
            self._copy_part(key)
            self._spare[key][0].resize_(0)
        for storage, bytes_ in self._spare.values():
            storage.resize_(bytes_)

    def is_gone(self, parameter: Tensor) -> bool:
        """Return whether a parameter's memory was taken."""
        return storage_key(parameter) in self._spare

    def share_of(self, parameter: Tensor) -> Tensor | None:
        """Return the share of a parameter whose memory was taken; None if there is none."""
        number, _ = self._shared.get(storage_key(parameter), (-1, None))
        return None if number in self.lost else self._parts.get(number)

    def _copy_part(self, key: int) -> None:
        """Copy the share of a parameter that has its values."""
        number, tensor = self._shared[key]
        self._copies = True
        self._parts[number] = self._shares[number].of(tensor)
        self._copies = False

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
            if self.registered in self._shares:
                self._shared[key] = self.registered, parameter.data
        self.registered += 1

    def _may_take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._spare[storage_key(tensor)] = storage, storage.nbytes()

    def _turn_to(self, keys: Collection[int]) -> None:
        """Take the memory of all but these."""
        for key in self._there.difference(keys):
            if key in self._shared:
                self._copy_part(key)
            self._spare[key][0].resize_(0)
            self._there.remove(key)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._copies:
            return function(*args, **kwargs)
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
            self.lost -= {self._shared[key][0] for key in first if key in self._shared}
            return
        made = [t for t in _tensors(results) if storage_key(t) not in gone]
        written = [*_written(function, args, kwargs)]
        made += [t for t in written if storage_key(t) not in gone]
        if name == "_to_copy":
            self._convert(function, args, kwargs, results, next(iter(gone)))
        changed = {*map(storage_key, written)} & self._shared.keys()
        self.lost |= {self._shared[key][0] for key in changed}
        self._there -= changed
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

    def _convert(self, function: Any, args: Any, kwargs: Any, result: Tensor, key: int) -> None:
        """Give what a parameter is converted to the converted share."""
        number, _ = self._shared.get(key, (-1, None))
        if number in self._parts and number not in self.lost:
            self._parts[number] = function(self._parts[number], *args[1:], **kwargs)
            self._shared[storage_key(result)] = number, result


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
