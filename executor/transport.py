"""Messages between neighbouring stages, over whatever the process group can carry."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from executor.worker import TensorSpec


class Sending(Protocol):
    """A send under way, which holds its tensor."""

    def wait(self) -> None:
        """Until the tensor may be freed."""


class Receiving(Protocol):
    """A receive under way.

    Attributes:
        arrived_s: when it ended, in :func:`time.perf_counter` seconds, if anybody watched.
    """

    arrived_s: float | None

    def wait(self) -> Tensor:
        """The tensor, once it is here."""


class Transport(Protocol):
    """Sends and receives tensors; those between two ranks arrive in the order they were sent."""

    def send(self, tensor: Tensor, peer: int) -> Sending:
        """Start to send a tensor."""

    def receive(self, spec: TensorSpec, peer: int) -> Receiving:
        """Start to receive the next tensor of a rank."""


class _Sending:
    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self) -> None:
        self._work.wait()


class _Receiving:
    def __init__(self, work: Any, buffer: Tensor, device: torch.device) -> None:
        self._work = work
        self._buffer = buffer
        self._device = device
        self.arrived_s: float | None = None

    def wait(self) -> Tensor:
        self._work.wait()
        return self._buffer.to(self._device)


class DirectTransport:
    """The process group reads and writes the device's memory itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, tensor: Tensor, peer: int) -> Sending:
        """Start to send a tensor."""
        whole = tensor.contiguous()
        return _Sending(dist.isend(whole, peer), whole)

    def receive(self, spec: TensorSpec, peer: int) -> Receiving:
        """Start to receive the next tensor of a rank."""
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        return _Receiving(dist.irecv(buffer, peer), buffer, self._device)


class HostTransport:
    """By way of the CPU's memory: gloo sends and receives no tensor of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, tensor: Tensor, peer: int) -> Sending:
        """Copy it to the CPU, which waits for the GPU, and start to send it."""
        copy = tensor.cpu().contiguous()
        return _Sending(dist.isend(copy, peer), copy)

    def receive(self, spec: TensorSpec, peer: int) -> Receiving:
        """Start to receive the next tensor of a rank; it goes to the GPU when it is asked for."""
        buffer = torch.empty(spec.shape, dtype=spec.dtype)
        return _Receiving(dist.irecv(buffer, peer), buffer, self._device)


def transport_of(device: torch.device, backend: str) -> Transport:
    """How tensors of a device travel."""
    if device.type == "cuda" and backend == "gloo":
        return HostTransport(device)
    return DirectTransport(device)
