"""All uses of torch beyond its public API.

No other module of Pipeplan uses a private name of torch. tests/tracing/test_torch_contract.py tests
what is expected of each of them; a new version of torch has to pass it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from planner.errors import PipeplanError

try:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.autograd.function import _SingleLevelFunction
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils.flop_counter import flop_registry
except ImportError as error:
    raise PipeplanError(
        f"torch {torch.__version__}: {error}; Pipeplan runs with torch 2.11 to 2.13 and newer "
        'versions that still have it: run pip install "torch>=2.11,<2.14"'
    ) from error

FunctionBase = _SingleLevelFunction
"""The class whose ``apply`` every autograd Function inherits."""
MATH_ATTENTION = torch.ops.aten._scaled_dot_product_attention_math.default
"""Attention as torch computes it where it drops weights on a CPU; returns (mixture, weights)."""
OLDEST = (2, 11)
"""The oldest supported version of torch."""
EXPORT_MODULES = ("torch._dynamo", "torch._export", "torch.export", "torch.fx", "torch._subclasses")
"""Modules of torch.export's own exceptions; the classes have moved between versions."""


def require_supported(version: str = torch.__version__) -> None:
    """Refuse a torch that is too old.

    Raises:
        PipeplanError: naming the version found and what to install.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise PipeplanError(
            f"torch {version} is too old: Pipeplan traces and runs models with torch {oldest} or "
            f'newer; run pip install "torch>={oldest}"'
        )


def schema_name(operator: OpOverload) -> str:
    """Return the name without the overload, such as ``aten::linear``."""
    return str(operator._schema.name)


def schema_arguments(operator: OpOverload) -> list[Any]:
    """Return the arguments: ``name``, ``default_value`` and ``alias_info``.

    ``alias_info`` is None or has ``is_write``.
    """
    return list(operator._schema.arguments)


def returns_alias(operator: OpOverload) -> bool:
    """Return whether the operator returns an argument or a view of one."""
    return any(returned.alias_info is not None for returned in operator._schema.returns)


def packet_of(operator: OpOverload) -> Any:
    """Return all overloads of an operator, such as ``torch.ops.aten.linear``.

    Its ``__name__`` is ``linear``.
    """
    return operator._overloadpacket


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory, while they exist."""
    return int(tensor.untyped_storage()._cdata)


FLOP_FORMULAS: Mapping[Any, Callable[..., int]] = flop_registry
"""Formulas of torch's own FLOP counter, by all overloads of an operator (:func:`packet_of`)."""


def default_store() -> Any:
    """Return the store of the default process group under a separate prefix."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


GlooDevice = Any
"""The network interface of gloo's connections of one process."""


def gloo_device(host: str) -> GlooDevice:
    """Return a gloo device for an address of this machine."""
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo.create_device(hostname=host)


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, device: GlooDevice) -> Any:
    """Return a separate process group of gloo, with one thread.

    Its members meet in ``store``; no other rank takes part, and none waits for the default group.

    Raises:
        RuntimeError: if the members do not come in time.
    """
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._threads = 1
    options._timeout = timeout
    store.set_timeout(timeout)
    return ProcessGroupGloo(store, rank, size, options)
