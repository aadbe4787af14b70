"""Megatron-LM's GPT as a tensor-parallel group runs it, as a layer graph.

A layer is a transformer block, whose figures are those of all devices of the group together, as
:func:`planner.model.group_graph.group_graph` makes them. FLOPs are those of Narayanan et al. 2021,
"Efficient Large-Scale Language Model Training on GPU Clusters", appendix; bytes kept for the
backward those of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", equation 2; traffic counts what each operation of Megatron-LM's
``megatron/model/transformer.py`` reads and writes (bias, dropout and residual are one, and so are
bias and GeLU, and scale, mask and softmax), with elements of two bytes and masks of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner.model.figures import PHASES, Collective, CollectiveKind, Phase, Product, Work
from planner.model.graph_record import Boundary, GraphRecord, Layer, Parameter
from planner.model.layer_graph import LayerGraph

PRECISION = "float16"
ELEMENT = 2
KERNELS = {"forward": 32, "input_gradient": 44, "weight_gradient": 20}
"""Kernels that a block launches: counted in its operations, of which 12 add to gradients."""


@dataclass(frozen=True)
class Gpt:
    """Sizes of a GPT and of what runs it.

    Attributes:
        blocks: transformer blocks.
        hidden: hidden size.
        heads: attention heads.
        sequence: tokens of a sample.
        vocabulary: padded size.
        samples: of a microbatch.
        degree: devices of a tensor-parallel group.
        sequence_parallel: whether the group shares values between split products by positions.
        selective: whether the core of attention runs again in the backward.
    """

    blocks: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    samples: int
    degree: int
    sequence_parallel: bool = False
    selective: bool = False

    @property
    def whole(self) -> int:
        """Devices of a group that each do and hold what is not split."""
        return 1 if self.sequence_parallel else self.degree

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.samples * self.sequence

    @property
    def activation_bytes(self) -> int:
        """Bytes of the tensor between two blocks on one device."""
        return ELEMENT * self.tokens * self.hidden

    def graph(self) -> LayerGraph:
        """Return the layers: embedding, blocks, and the head with the loss.

        A tensor between layers that every device of a group has whole is sent in parts.
        """
        names = ["embedding", *(f"block.{index}" for index in range(self.blocks)), "head"]
        bytes_ = self.activation_bytes * self.whole
        elements = dict.fromkeys(names[1:-1], 12 * self.hidden**2)
        elements["embedding"] = self.vocabulary * self.hidden
        block = self._block()
        blocks = (block.model_copy(update=_named(name)) for name in names[1:-1])
        return LayerGraph.from_record(
            GraphRecord(
                name="gpt",
                samples_per_microbatch=self.samples,
                precision=PRECISION,
                layers=(self._embedding(), *blocks, self._head()),
                boundaries=tuple(
                    Boundary(
                        name=f"{first}.output",
                        producer=first,
                        users=(second,),
                        bytes=bytes_,
                        shape=(bytes_ // ELEMENT,),
                        dtype=PRECISION,
                        requires_grad=True,
                        saved_by=second,
                        parts=self.whole,
                    )
                    for first, second in pairwise(names)
                ),
                parameters=tuple(
                    Parameter(name=f"{name}.weight", elements=count, bytes=ELEMENT * count)
                    for name, count in elements.items()
                ),
            )
        )

    def _block(self) -> Layer:
        tokens, hidden, share, whole = self.tokens, self.hidden, self.degree, self.whole
        products = tuple(
            Product(operator=name, batch=1, rows=tokens, inner=inner, columns=columns)
            for name, inner, columns in (
                ("qkv", hidden, 3 * hidden // share),
                ("projection", hidden // share, hidden),
                ("up", hidden, 4 * hidden // share),
                ("down", 4 * hidden // share, hidden),
            )
        )
        scores = self.samples * self.heads * self.sequence**2
        width, attention = tokens * hidden, 4 * scores * hidden // self.heads
        # Norms, dropouts and residuals are whole on every device, unless they are shared by
        # positions; the rest is shared.
        moved = {
            "forward": whole * (2 * 4 + 2 * 7) * width + 4 * 4 * width + (4 + 5) * scores,
            "input_gradient": whole * (2 * 6 + 2 * 11) * width + 6 * 4 * width + (6 + 5) * scores,
            "weight_gradient": 3 * ELEMENT * 12 * hidden**2,
        }
        runs: dict[Phase, int] = {"forward": 1, "input_gradient": 2, "weight_gradient": 0}
        kernels: dict[Phase, int] = {**KERNELS}
        if self.selective:  # Products, softmax and dropout of the scores run a second time.
            runs["input_gradient"] += 1
            moved["input_gradient"] += (4 + 5) * scores
            kernels["input_gradient"] += 4
        work = []
        for phase in PHASES:
            work.append(_products(phase, products, share))
            count = runs[phase]
            if count:
                between = ELEMENT * (scores + 3 * width)
                work.append(
                    _work(phase, "attention", 2 * count, count * attention, count * between)
                )
            others = kernels[phase] - len(products) - 2 * count
            work.append(_work(phase, "memory", others, 0, moved[phase]))
        kept, scored = (10 * whole + 24) * width, 5 * scores
        return _layer(
            "block.0",
            work,
            products=products,
            collectives=self._reductions(2, ("forward", "input_gradient")),
            stash_bytes=kept if self.selective else kept + scored,
            again_bytes=scored if self.selective else 0,
            parameters=("block.0.weight",),
        )

    def _embedding(self) -> Layer:
        moved = 3 * ELEMENT * self.tokens * self.hidden * self.whole
        work = [
            _work("forward", "memory", 3, 0, moved),
            _work("weight_gradient", "memory", 2, 0, moved),
        ]
        return _layer(
            "embedding",
            work,
            collectives=self._reductions(1, ("forward",)),
            stash_bytes=self.whole * self.tokens * self.hidden,
            parameters=("embedding.weight",),
        )

    def _head(self) -> Layer:
        """Return final norm, product with the vocabulary and a loss in float32 over its parts."""
        rows, columns = self.tokens, self.vocabulary // self.degree
        product = Product(operator="head", batch=1, rows=rows, inner=self.hidden, columns=columns)
        logits = rows * self.vocabulary
        moved = {"forward": 30 * logits, "input_gradient": 14 * logits}
        work = []
        for phase in PHASES:
            work.append(_products(phase, (product,), self.degree))
            if phase in moved:
                work.append(_work(phase, "memory", 6, 0, moved[phase]))
        return _layer(
            "head",
            work,
            products=(product,),
            collectives=self._reductions(1, ("input_gradient",)),
            stash_bytes=4 * logits + 2 * self.whole * self.activation_bytes,
            # The logits in both precisions and their gradient.
            peak_bytes=10 * logits + 2 * self.whole * self.activation_bytes,
            parameters=("embedding.weight",),
        )

    def _reductions(self, count: int, phases: Sequence[Phase]) -> tuple[Collective, ...]:
        """Return all-reduces; of values shared by positions, gathers and sums of parts."""
        if self.degree == 1:
            return ()
        kinds: tuple[CollectiveKind, ...] = ("all_reduce",)
        if self.sequence_parallel:
            kinds = ("all_gather", "reduce_scatter")
        return tuple(
            Collective(kind=kind, phase=phase, tensor="x", bytes=self.activation_bytes)
            for phase in phases
            for _ in range(count)
            for kind in kinds
        )


def _named(name: str) -> dict[str, Any]:
    return {"name": name, "parameters": (f"{name}.weight",)}


def _work(phase: Phase, kind: str, operations: int, flops: int, bytes_: int) -> Work:
    return Work.model_validate(
        {
            "phase": phase,
            "operation_class": kind,
            "operations": operations,
            "flops": flops,
            "traffic_bytes": bytes_,
        }
    )


def _products(phase: Phase, products: Sequence[Product], degree: int) -> Work:
    """Return the products of all devices of a group in a phase."""
    flops = degree * sum(product.flops() for product in products)
    bytes_ = degree * sum(
        ELEMENT * (p.rows * p.inner + p.inner * p.columns + p.rows * p.columns) for p in products
    )
    return _work(phase, "product", len(products), flops, bytes_)


def _layer(name: str, work: Sequence[Work], **figures: Any) -> Layer:
    sums = {
        f"{phase}_{what}": sum(getattr(row, what) for row in work if row.phase == phase)
        for phase in PHASES
        for what in ("flops", "traffic_bytes")
    }
    return Layer(name=name, work=tuple(work), **sums, **figures)
