"""FLOPs, traffic and stash of each operation, counted on the meta device.

The exported graph is run node by node on meta tensors: nothing is computed, but torch's own FLOP
formulas and autograd's own choice of what to save apply to every operation.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from planner.errors import PipeplanError
from planner.model.figures import OperationClass
from planner.tracing.export import ExportedStep
from planner.tracing.gradients import is_detached
from planner.tracing.layers import LayerAssignment
from planner.tracing.operators import (
    FLOPS,
    FREE,
    LOOKUPS,
    MATRIX_PRODUCTS,
    TRAFFIC_BOUND,
    WeightStash,
)
from planner.tracing.sharing import operator_name, shape_of
from planner.tracing.torch_private import (
    TorchDispatchMode,
    has_flop_formula,
    packet_of,
    storage_key,
    tree_leaves,
)
from planner.tracing.user_code import one_line

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass
class OperationCost:
    """FLOPs and traffic of one operation: of its forward and its two gradients.

    Attributes:
        operation_class: class of its products, if it has any.
        launches: number of device operations of its forward.
        gradients: the input gradient's number of operations relative to the forward's.
    """

    forward_flops: int = 0
    input_gradient_flops: int = 0
    weight_gradient_flops: int = 0
    forward_traffic_bytes: int = 0
    input_gradient_traffic_bytes: int = 0
    weight_gradient_traffic_bytes: int = 0
    operation_class: OperationClass = "memory"
    launches: int = 1
    gradients: int = 1


@dataclass
class Measurement:
    """The counts of a run on the meta device.

    Attributes:
        cost: cost of each operation.
        saved: ``(first operation that saves it, bytes)`` of each storage that autograd keeps.
        savers: all operations that save each of these.
        again: the same as ``saved`` of storages that are not kept, since the backward makes them
            again.
        storage: storage of each operation's value.
        requires_grad: operations whose value takes a gradient.
        weight_stash: what is kept for the weight gradients of split backwards: operation, storage
            (None: its gradient) and bytes.
        counted, uncounted: number of runs of operators with and without a known cost; the latter by
            name.
    """

    cost: dict[fx.Node, OperationCost] = field(default_factory=dict)
    saved: dict[int, tuple[fx.Node, int]] = field(default_factory=dict)
    savers: defaultdict[int, set[fx.Node]] = field(default_factory=lambda: defaultdict(set))
    again: dict[int, tuple[fx.Node, int]] = field(default_factory=dict)
    storage: dict[fx.Node, int] = field(default_factory=dict)
    requires_grad: set[fx.Node] = field(default_factory=set)
    weight_stash: tuple[tuple[fx.Node, int | None, int], ...] = ()
    counted: int = 0
    uncounted: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def coverage(self) -> float:
        """Fraction of the arithmetic operators whose cost is known."""
        missed = sum(self.uncounted.values())
        return 1.0 if not missed else self.counted / (self.counted + missed)


def measure(
    exported: ExportedStep, layers: LayerAssignment, batch: Mapping[str, Tensor]
) -> Measurement:
    """Run the exported step on meta tensors and count.

    Raises:
        PipeplanError: naming the operator and its layer if one cannot run on meta tensors.
    """
    runner = _Runner(exported, layers)
    arguments = [batch[str(node.target)] for node in layers.inputs]
    with saved_tensors_hooks(runner.pack, lambda tensor: tensor):
        try:
            runner.run(*arguments)
        except Exception as error:
            raise PipeplanError(runner.refusal(error)) from error
    runner.result.weight_stash = runner.weight_stash.kept(layers.layer_of)
    return runner.result


class _TrafficCounter(TorchDispatchMode):
    """Bytes read and written by dispatched operators, and operators without a known cost."""

    def __init__(self, result: Measurement) -> None:
        super().__init__()
        self.result = result
        self.bytes = 0
        self.launches = 0
        self.flops = 0  # Of products that torch's own counter does not know.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = packet_of(func).__name__
        if getattr(func, "is_view", False) or name in FREE:
            return out
        self.launches += 1
        if name in FLOPS:
            self.flops += FLOPS[name](*args, **(kwargs or {}))
        read = args[1:] if name in LOOKUPS else args
        leaves = tree_leaves([read, kwargs or {}, out])
        tensors = {id(value): value for value in leaves if isinstance(value, Tensor)}
        self.bytes += sum(value.numel() * value.element_size() for value in tensors.values())
        if (
            torch.Tag.pointwise in func.tags
            or not TRAFFIC_BOUND.isdisjoint((name, name.rstrip("_")))
            or name in FLOPS
            or has_flop_formula(packet_of(func))
        ):
            self.result.counted += 1
        else:
            self.result.uncounted[str(packet_of(func))] += 1
        return out


class _Runner(fx.Interpreter):
    """Runs the graph and adds every cost to the node that causes it."""

    def __init__(self, exported: ExportedStep, layers: LayerAssignment) -> None:
        super().__init__(exported.module, garbage_collect_values=False)
        self.result = Measurement()
        self.layers = layers
        self.current: fx.Node | None = None
        self.running = next(iter(exported.graph.nodes))
        self.weights = _weight_only_nodes(exported)
        self.weight_stash = WeightStash(exported.module)
        parameters = [*exported.module.parameters(), *exported.module.buffers()]
        self.not_stash = {storage_key(p) for p in parameters}
        self.kept_alive: list[Tensor] = []  # A freed storage's address could be used again.

    def refusal(self, error: Exception) -> str:
        """Describe in one line why the graph could not be run."""
        node = self.running
        where = f" of layer {layer!r}" if (layer := self.layers.layer_of.get(node)) else ""
        return f"operator {node.target}{where} cannot be measured without data: {one_line(error)}"

    def pack(self, tensor: Tensor) -> Tensor:
        key, bytes_ = storage_key(tensor), tensor.untyped_storage().nbytes()
        if self.current is not None and key not in self.not_stash:
            self.kept_alive.append(tensor)
            self.result.saved.setdefault(key, (self.current, bytes_))
            self.result.savers[key].add(self.current)
            self.weight_stash.saved(self.current, key, bytes_)
        return tensor

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, counting it if it is an operation of a layer."""
        self.running = n
        if n.op != "call_function":
            return super().run_node(n)
        self.current = n if n in self.layers.layer_of else None
        traffic = _TrafficCounter(self.result)
        with FlopCounterMode(display=False) as flops, traffic:
            value = super().run_node(n)
        self.current = None
        self.weight_stash.made(n, value)
        self._book(n, value, flops.get_total_flops() + traffic.flops, traffic)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; attention runs as fused kernels do, without keeping the scores."""
        if target is ATTENTION:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            return _FusedAttention.apply(*args[:3], mask)
        return super().call_function(target, args, kwargs)

    def _book(self, node: fx.Node, value: Any, flops: int, traffic: _TrafficCounter) -> None:
        if isinstance(value, Tensor):
            self.result.storage[node] = storage_key(value)
            if value.requires_grad:
                self.result.requires_grad.add(node)
        if node not in self.layers.layer_of:
            return
        if node.target is ATTENTION:
            self.result.counted += 1
            self.result.cost[node] = self._attention_cost(node)
            return
        passes = not isinstance(value, Tensor) or value.requires_grad
        operands = node.all_input_nodes if passes else []
        activations = [n for n in operands if n in self.result.requires_grad]
        activations = [n for n in activations if n not in self.weights]
        weights = [n for n in operands if n in self.weights and len(shape_of(n)) >= 2]
        cost = _with_gradients(node, flops, traffic.bytes, activations, weights)
        cost.launches = traffic.launches
        self.result.cost[node] = cost

    def _attention_cost(self, node: fx.Node) -> OperationCost:
        query, key, value = (self.env[n] for n in node.args[:3])  # type: ignore[index]
        pairs = query.shape[:-1].numel() * key.shape[-2]
        flops = 2 * pairs * (query.shape[-1] + value.shape[-1])
        moved = [self.env[n] for n in node.all_input_nodes] + [query]
        traffic = sum(t.numel() * t.element_size() for t in moved)
        # Dao 2023, "FlashAttention-2": two products forward; backward has five, the scores
        # being computed again. It has all gradients or none.
        trains = node in self.result.requires_grad
        return OperationCost(
            forward_flops=flops,
            input_gradient_flops=flops * 5 // 2 if trains else 0,
            forward_traffic_bytes=traffic,
            input_gradient_traffic_bytes=2 * traffic if trains else 0,
            gradients=int(trains),
            operation_class="causal_attention" if _is_causal(node) else "attention",
        )


def _with_gradients(
    node: fx.Node, flops: int, traffic: int, activations: list[fx.Node], weights: list[fx.Node]
) -> OperationCost:
    """Return an operation's cost with its gradients.

    A product's gradients take one product per operand; those of other operators take their traffic.
    """
    cost = OperationCost(forward_flops=flops, forward_traffic_bytes=traffic)
    name = operator_name(node)
    products = len(activations) if name in MATRIX_PRODUCTS else min(1, len(activations))
    if flops:
        cost.operation_class = "convolution" if "conv" in name else "product"
        cost.gradients = products
    cost.input_gradient_flops = flops * products
    cost.input_gradient_traffic_bytes = traffic * (products if flops else min(1, products))
    if weights:
        cost.weight_gradient_flops = flops
        cost.weight_gradient_traffic_bytes = traffic if flops else 2 * sum(map(_bytes, weights))
    return cost


def _weight_only_nodes(exported: ExportedStep) -> set[fx.Node]:
    """Return trainable parameters and values computed from nothing else (a transposed weight)."""
    weights: set[fx.Node] = set()
    for node in exported.graph.nodes:
        operands = node.all_input_nodes
        if node.op == "get_attr":
            value = exported.attribute(node)
            if isinstance(value, nn.Parameter) and value.requires_grad:
                weights.add(node)
        elif node.op == "call_function" and not is_detached(node):
            weights.update([node] if operands and weights.issuperset(operands) else [])
    return weights


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


def _is_causal(node: fx.Node) -> bool:
    """Return ``is_causal`` of torch's scaled_dot_product_attention."""
    is_causal = node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False)
    return is_causal is True


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
