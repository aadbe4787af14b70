"""Offloaded stashes: on the host between the forward and the backward of a microbatch.

Rhu et al. 2016, "vDNN". What autograd saves in offloaded layers is copied to the host once the
forward has ended, and back before the backward. On a GPU a stream of its own copies, to and from
pinned memory, one stash after the other as docs/memory.md has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from executor.runtime.worker import Worker
from planner.plan.operations import Operation, Orders
from planner.plan.stash_offload import brought_back_during


class _Block:
    """The memory of one or more saved tensors, on the device or on the host."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.on_device: torch.UntypedStorage | None = storage
        self.on_host: Tensor | None = None
        self.arrival: torch.cuda.Event | None = None

    def view(self) -> Tensor:
        """Return all its bytes."""
        assert self.on_device is not None, "a stash is used that is on the host"
        device = self.on_device.device
        return torch.empty(0, dtype=torch.uint8, device=device).set_(self.on_device)

    def storage(self) -> torch.UntypedStorage:
        """Return its memory on the device, for what runs on the current stream from now on."""
        if self.arrival is not None:
            torch.cuda.current_stream().wait_event(self.arrival)
            self.arrival = None
        assert self.on_device is not None, "a stash is used that is on the host"
        return self.on_device


@dataclass(frozen=True)
class _Saved:
    """A saved tensor as a part of a block."""

    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor again."""
        storage = self.block.storage()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class _HostCopies:
    """Copies that have ended when they return."""

    def out(self, blocks: Iterable[_Block]) -> None:
        """Copy blocks to the host and give their memory back."""
        for block in blocks:
            block.on_host, block.on_device = block.view().clone(), None

    def back(self, blocks: Iterable[_Block]) -> None:
        """Copy blocks to the device."""
        for block in blocks:
            assert block.on_host is not None
            block.on_device, block.on_host = block.on_host.untyped_storage(), None


class _CudaCopies:
    """Copies on a stream of their own, in the order in which they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, blocks: Iterable[_Block]) -> None:
        """Copy blocks to the host once what makes them has run, then give their memory back."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for block in blocks:
            whole = block.view()
            block.on_host = torch.empty(whole.numel(), dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(self._stream):
                block.on_host.copy_(whole, non_blocking=True)
            # Its memory is free for others once the copy has ended.
            whole.record_stream(self._stream)
            block.on_device = None

    def back(self, blocks: Iterable[_Block]) -> None:
        """Begin to copy blocks to the device, once what was asked for before has run there."""
        pairs = []
        for block in blocks:
            assert block.on_host is not None
            whole = torch.empty(block.on_host.numel(), dtype=torch.uint8, device=self._device)
            pairs.append((block, whole))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for block, whole in pairs:
            with torch.cuda.stream(self._stream):
                assert block.on_host is not None
                whole.copy_(block.on_host, non_blocking=True)
                block.arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
                block.arrival.record(self._stream)
            block.on_device, block.on_host = whole.untyped_storage(), None


class StashOffload:
    """The stashes of one stage's microbatches that travel to the host.

    Args:
        device: of the stage.
        held: returns parameters and buffers, which stay.
    """

    def __init__(self, device: torch.device, held: Callable[[], Iterable[Tensor]]) -> None:
        self._copies = _CudaCopies(device) if device.type == "cuda" else _HostCopies()
        self._device, self._held = device, held
        self._away: dict[int, list[_Block]] = {}
        self._blocks: dict[int, _Block] = {}
        self._staying: list[Any] = []

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Take in what autograd saves meanwhile, in an offloaded layer."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that others than offloaded layers hold too: these stay on the device."""
        self._staying += [_reference(tensor) for tensor in tensors]

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        is_plain = tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
        if not is_plain or tensor.device.type != self._device.type or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        block = self._blocks.setdefault(_reference(tensor).cdata, _Block(storage))
        return _Saved(
            block, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def leave(self, microbatch: int) -> None:
        """The forward has ended: what it saved sets off, but for what stays."""
        self.stay(self._held())
        # The address of memory that is gone may be that of a saved tensor now.
        staying = {row.cdata for row in self._staying if not row.expired()}
        leaving = [block for key, block in self._blocks.items() if key not in staying]
        self._blocks, self._staying = {}, []
        self._copies.out(leaving)
        self._away[microbatch] = leaving

    def bring_back(self, microbatch: int) -> None:
        """Begin to bring a microbatch's stash back, if it is away."""
        self._copies.back(self._away.pop(microbatch, ()))


def _reference(tensor: Tensor) -> Any:
    """Return a weak reference to a tensor's memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _unpack(saved: Tensor | _Saved) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.tensor()


class StashReturn:
    """Has the stash for the next backward brought back before an operation; an observer of these.

    Args:
        workers: of this rank, by stage.
        orders: of this rank alone.
        offloads: by stage, whether it offloads anything.
    """

    def __init__(
        self, workers: Mapping[int, Worker], orders: Orders, offloads: Sequence[bool]
    ) -> None:
        self._workers = workers
        self._backwards = brought_back_during(orders, offloads)

    def before(self, operation: Operation) -> None:
        """Begin to bring back what the operation behind this one needs."""
        backward = self._backwards.get(operation)
        if backward is not None:
            self._workers[backward.stage].bring_back(backward.microbatch)

    def after(self, operation: Operation) -> None:
        """Nothing to finish."""
