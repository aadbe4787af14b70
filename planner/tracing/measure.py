"""FLOPs, traffic and stash of each operation, counted on the meta device.

The exported graph is run node by node on meta tensors: nothing is computed, but torch's own FLOP
formulas and autograd's own choice of what to save apply to every operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from planner.errors import PipeplanError
from planner.model.figures import OperationClass, Phase, Product, Work
from planner.tracing.export import ExportedStep
from planner.tracing.gradients import is_deferrable, trained_weights
from planner.tracing.layers import LayerAssignment
from planner.tracing.sharing import bytes_of, operator_name, shape_of
from planner.tracing.torch_private import (
    FLOP_FORMULAS,
    TorchDispatchMode,
    packet_of,
    storage_key,
    tree_leaves,
)
from planner.tracing.user_code import one_line

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_GROUPED = frozenset(("_grouped_mm", "grouped_mm_fallback", "grouped_product"))
"""Products of rows sorted by group with the matrix of their group; torch has no formula."""
MATRIX_PRODUCTS = _GROUPED | frozenset(
    "linear matmul mm bmm addmm baddbmm einsum dot mv conv1d conv2d conv3d convolution "
    "conv_transpose2d".split()
)
# Operators that do arithmetic torch's FLOP counter has no formula for, but so little of it per
# byte that their time is their traffic: normalisations, reductions, lookups, pooling.
_TRAFFIC_BOUND = frozenset(
    (
        "_softmax _log_softmax native_layer_norm native_batch_norm native_group_norm "
        "_fused_rms_norm rms_norm cudnn_batch_norm _native_batch_norm_legit batch_norm "
        "_batch_norm_with_update embedding nll_loss_forward nll_loss2d_forward mse_loss "
        "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d mean sum amax amin max min "
        "argmax var var_mean cumsum cat stack index index_select gather scatter scatter_add "
        "index_put index_add copy_ clone _to_copy arange zeros ones full new_zeros "
        "new_ones zeros_like ones_like full_like rand randn rand_like "
        "randn_like linspace logspace eye bernoulli native_dropout fill_ zero_ tril triu "
        "constant_pad_nd repeat roll flip topk sort one_hot upsample_nearest2d upsample_bilinear2d "
        "any all norm linalg_vector_norm scalar_tensor lift_fresh_copy slice_scatter "
        "select_scatter split_with_sizes_copy _local_scalar_dense masked_fill where "
        "floor_divide histc dispatch_to_experts expert_offsets combine_experts"
    ).split()
)
# Some are views that torch does not mark as such: an LSTM divides its gates by unsafe_chunk, a
# product without bias gives back its rows by _unsafe_view. The last ones only allocate.
_FREE = frozenset(
    "detach _assert_tensor_metadata lift_fresh unsafe_split unsafe_chunk _unsafe_view empty "
    "empty_like new_empty empty_strided".split()
)


class Saved(NamedTuple):
    """A storage that autograd keeps for the backward.

    Attributes:
        bytes: its size.
        nodes: the operations that save it, in order.
    """

    bytes: int
    nodes: list[fx.Node]


Held = tuple[fx.Node, int | None, int]
"""An operation, a storage that is kept for its backward (None: the gradient of its value), bytes"""


@dataclass
class Measurement:
    """The counts of a run on the meta device.

    Attributes:
        work: rows of each operation of a layer: of its forward and its two gradients.
        saved: storages that autograd keeps.
        again: storages that are not kept, since the backward makes them again.
        storage: storage of each operation's value.
        requires_grad: operations whose value takes a gradient.
        weight_stash: what is kept for the weight gradients of split backwards.
        counted, uncounted: runs of operators with a known cost; and without one, by name.
    """

    work: dict[fx.Node, tuple[Work, ...]] = field(default_factory=dict)
    saved: dict[int, Saved] = field(default_factory=dict)
    again: dict[int, Saved] = field(default_factory=dict)
    storage: dict[fx.Node, int] = field(default_factory=dict)
    requires_grad: set[fx.Node] = field(default_factory=set)
    weight_stash: tuple[Held, ...] = ()
    counted: int = 0
    uncounted: Counter[str] = field(default_factory=Counter)

    @property
    def coverage(self) -> float:
        """Fraction of the arithmetic operators whose cost is known."""
        missed = self.uncounted.total()
        return 1.0 if not missed else self.counted / (self.counted + missed)

    def held(self) -> dict[str, Iterable[Held]]:
        """Return what is kept for the backward, by the names of a layer's fields."""
        kept, again = (
            [(row.nodes[0], key, row.bytes) for key, row in rows.items()]
            for rows in (self.saved, self.again)
        )
        return {"stash_bytes": kept, "weight_stash_bytes": self.weight_stash, "again_bytes": again}


def measure(
    exported: ExportedStep, layers: LayerAssignment, batch: Mapping[str, Tensor]
) -> Measurement:
    """Run the exported step on meta tensors and count.

    Raises:
        PipeplanError: naming the operator and its layer if one cannot run on meta tensors.
    """
    runner = _Runner(exported, layers)
    arguments = [batch[str(node.target)] for node in layers.inputs]
    with saved_tensors_hooks(runner.pack, lambda tensor: tensor), runner.counter:
        try:
            runner.run(*arguments)
        except Exception as error:
            layer = layers.layer_of.get(runner.running)
            raise PipeplanError(
                f"operator {runner.running.target}{f' of layer {layer!r}' if layer else ''} cannot "
                f"be measured without data: {one_line(error)}"
            ) from error
    runner.result.weight_stash = tuple(runner.weight_stash())
    return runner.result


class _Counter(TorchDispatchMode):
    """Counts the dispatched operators that one operation of the graph consists of."""

    def __init__(self, result: Measurement) -> None:
        super().__init__()
        self.result = result
        self.clear()

    def clear(self) -> None:
        self.bytes = self.launches = self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        name = packet_of(func).__name__
        if getattr(func, "is_view", False) or name in _FREE:
            return out
        self.launches += 1
        formula = _grouped_flops if name in _GROUPED else FLOP_FORMULAS.get(packet_of(func))
        if formula is not None:
            self.flops += formula(*args, **given, out_val=out)
        read = args[1:] if name == "embedding" else args  # It reads the rows it looks up.
        values = {id(x): x for x in tree_leaves([read, given, out]) if isinstance(x, Tensor)}
        self.bytes += sum(value.numel() * value.element_size() for value in values.values())
        is_known = formula is not None or torch.Tag.pointwise in func.tags
        if is_known or not _TRAFFIC_BOUND.isdisjoint((name, name.rstrip("_"))):
            self.result.counted += 1
        else:
            self.result.uncounted[str(packet_of(func))] += 1
        return out


def _grouped_flops(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]


class _Runner(fx.Interpreter):
    """Runs the graph and books every cost to the operation that causes it."""

    def __init__(self, exported: ExportedStep, layers: LayerAssignment) -> None:
        super().__init__(exported.module, garbage_collect_values=False)
        self.result = Measurement()
        self.counter = _Counter(self.result)
        self.layers = layers
        self.running = next(iter(exported.graph.nodes))
        self.weights = trained_weights(exported.module)
        self.tables: set[fx.Node] = set()  # Weights, and values computed from nothing else.
        for node in exported.graph.nodes:
            if node in self.weights and self.tables.issuperset(node.all_input_nodes):
                self.tables.add(node)
        held = [*exported.module.parameters(), *exported.module.buffers()]
        self.held = {storage_key(value) for value in held}
        self.kept_alive: list[Tensor] = []  # A freed storage's address could be used again.

    def pack(self, tensor: Tensor) -> Tensor:
        """Note what the running operation saves for its backward."""
        key, bytes_ = storage_key(tensor), tensor.untyped_storage().nbytes()
        if self.running in self.layers.layer_of and key not in self.held:
            self.kept_alive.append(tensor)
            nodes = self.result.saved.setdefault(key, Saved(bytes_, [])).nodes
            nodes += [self.running] * (self.running not in nodes[-1:])
        return tensor

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, counting it if it is an operation of a layer."""
        self.running = n
        self.counter.clear()
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor):
            self.result.storage[n] = storage_key(value)
            if value.requires_grad:
                self.result.requires_grad.add(n)
        if n in self.layers.layer_of:
            is_attention = n.target is ATTENTION
            self.result.counted += is_attention
            self.result.work[n] = self._attention(n) if is_attention else self._work(n, value)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; attention runs as fused kernels do, without keeping the scores."""
        if target is ATTENTION:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            return _FusedAttention.apply(*args[:3], mask)
        return super().call_function(target, args, kwargs)

    def _work(self, node: fx.Node, value: Any) -> tuple[Work, ...]:
        """Return an operation's work with its gradients.

        A product's gradients take a product for each operand; those of others take their traffic.
        """
        name, flops, traffic = operator_name(node), self.counter.flops, self.counter.bytes
        passes = not isinstance(value, Tensor) or value.requires_grad
        operands = node.all_input_nodes if passes else []
        tables = [n for n in operands if n in self.tables and len(shape_of(n)) >= 2]
        count = len({*operands} & self.result.requires_grad - self.tables)
        count = count if flops and name in MATRIX_PRODUCTS else min(1, count)
        moved = traffic if flops else 2 * sum(map(bytes_of, tables))
        kind: OperationClass = "convolution" if "conv" in name else "product"
        launches = self.counter.launches
        return _rows(
            kind if flops else "memory",
            ("forward", launches, flops, traffic),
            ("input_gradient", launches * count, flops * count, traffic * count),
            ("weight_gradient", launches, flops * bool(tables), moved * bool(tables)),
        )

    def _attention(self, node: fx.Node) -> tuple[Work, ...]:
        query, key, value = (self.env[n] for n in node.args[:3])  # type: ignore[index]
        pairs = query.shape[:-1].numel() * key.shape[-2]
        flops = 2 * pairs * (query.shape[-1] + value.shape[-1])
        moved = [self.env[n] for n in node.all_input_nodes] + [query]
        traffic = sum(t.numel() * t.element_size() for t in moved)
        is_causal = node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False)
        # Dao 2023, "FlashAttention-2": two products forward; backward has five, the scores
        # being computed again. It has all gradients or none.
        trains = node in self.result.requires_grad
        return _rows(
            "causal_attention" if is_causal is True else "attention",
            ("forward", 1, flops, traffic),
            ("input_gradient", 1, trains * flops * 5 // 2, trains * 2 * traffic),
        )

    def weight_stash(self) -> Iterator[Held]:
        """Yield what deferred weight gradients keep: saved tensors, each once, and gradients."""
        waiting = {n for n in self.layers.layer_of if is_deferrable(n, self.weights)}
        for key, saved in self.result.saved.items():
            first = next((node for node in saved.nodes if node in waiting), None)
            if first is not None:
                yield first, key, saved.bytes
        for node in waiting:
            made = [x for x in tree_leaves(self.env[node]) if isinstance(x, Tensor)]
            bytes_ = sum(x.numel() * x.element_size() for x in made if x.requires_grad)
            yield node, None, bytes_


def _rows(kind: OperationClass, *rows: tuple[Phase, int, int, int]) -> tuple[Work, ...]:
    """Return the work of phases; one without traffic is a view and no device operation."""
    return tuple(
        Work(
            phase=phase,
            operation_class=kind if flops else "memory",
            operations=max(1, operations),
            flops=flops,
            traffic_bytes=bytes_,
        )
        for phase, operations, flops, bytes_ in rows
        if flops or bytes_
    )


class _FusedAttention(torch.autograd.Function):
    """Replaces fused attention: same output shape, saves what those kernels save."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # In the order of dimensions of the query, so that joining the heads again copies nothing.
        same_size = query.shape[-1] == value.shape[-1]
        shape = (*query.shape[:-1], value.shape[-1])
        out = torch.empty_like(query) if same_size else query.new_empty(shape)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = query.new_empty(mask.shape)  # The kernels add it to the scores.
        ctx.save_for_backward(query, key, value, out, logsumexp, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("tracing runs no backward")


# --- products -------------------------------------------------------------------------------------


def products_of(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, Product]]:
    """Yield the matrix products among operations; convolutions are none."""
    for node in nodes:
        name = operator_name(node) if node.op == "call_function" else ""
        operands = _matrices(node)
        if name not in MATRIX_PRODUCTS or "conv" in name or len(operands) != 2:
            continue
        shape, inner = shape_of(node), shape_of(operands[0])[-1]
        batch, rows = 1, prod(shape[:-1])
        if is_batched(node):
            batch, rows = prod(shape[:-2]), shape[-2]
        columns = shape[-1]
        yield node, Product(operator=name, batch=batch, rows=rows, inner=inner, columns=columns)


def is_batched(node: fx.Node) -> bool:
    """Return whether a product is one of several matrices with as many others."""
    is_named_so = operator_name(node) in ("matmul", "bmm", "baddbmm")
    return is_named_so and len(shape_of(_matrices(node)[1])) > 2


def _matrices(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if len(shape_of(n)) > 1]
