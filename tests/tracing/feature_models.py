"""Small models, each with one thing that people write and export drops.

``REFUSED`` has the words of the refusal, ``KEPT`` those whose exported step trains as eager torch.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES = 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks; ``between`` is what a model does around each of them, by further attributes."""

    def __init__(self, between: Callable[..., Tensor] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.between = between or (lambda self, block, x: block(x))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.between(self, block, x)
        return self.head(x)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, 4), "target": torch.randint(CLASSES, (samples,))}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


scaled = Scaled.apply  # Bound before any trace.


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return (weight * 8).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class WithContext(torch.autograd.Function):
    """Saves tensors in ``setup_context``, returns two results, one without a gradient."""

    @staticmethod
    def forward(left, right):
        return left * right, left.detach().sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, gradient, _):
        left, right = ctx.saved_tensors
        return gradient * right * 0.5, gradient * left


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Listed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensors):
        return tensors[0] + tensors[1]

    @staticmethod
    def backward(ctx, gradient):
        return None


# --- what a model does around its blocks ----------------------------------------------------------


def rounded(self, block, x):
    weight = Rounded.apply(block.down.weight.t())
    return x + functional.linear(block.norm(x), weight)[..., :WIDTH]


def gated(self, block, x):
    product, sign = WithContext.apply(x, block(x))
    return product + sign * block.norm.weight


def with_autocast(device: str, **settings: Any) -> Callable[..., Tensor]:
    def cast(self, block, x):
        with torch.autocast(device, **settings):
            return block(x).float()

    return cast


def scaled_by_what_the_first_call_made(self, block, x):
    if not hasattr(self, "scale"):
        self.scale = x.shape[-1] ** -0.5
    return x + self.scale * block(x)


def hooked(self, block, x):
    x.register_hook(lambda gradient: gradient * 0.1)
    return block(x)


def warmed_up(self, block, x):
    self.calls += 1
    return x + min(1.0, self.calls / 1000) * block(x)


def counted(self, block, x):
    self.history.append(len(self.history))
    return block(x) if len(self.history) % 9 else x


def remembered(self, block, x):
    x = block(x) + self.memory[0]
    self.memory[0] = x.detach().mean(0)
    return x


def clamped(self, block, x):
    with torch.no_grad():
        block.up.weight.clamp_(-0.1, 0.1)
    return block(x)


def clamped_data(self, block, x):
    block.up.weight.data.clamp_(-0.1, 0.1)
    return block(x)


def followed(self, block, x):
    with torch.no_grad():
        self.slow.weight.mul_(0.9).add_(self.fast.weight, alpha=0.1)
    return block(x) + self.fast(x) + self.slow(x)


def routed(self, block, x):
    rows = torch.where(self.gate(x).argmax(-1) == 0)[0]
    return x.index_add(0, rows, block(x[rows]))


# --- models ---------------------------------------------------------------------------------------


def first_layer_frozen(model: nn.Module) -> nn.Module:
    model.first.requires_grad_(False)
    return model


def compiled_blocks() -> nn.Module:
    model = Net()
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block)
    model.head.compile()
    return model


def shared_block() -> nn.Module:
    model = Net(lambda self, block, x: block(block(block(x))))
    model.blocks = model.blocks[:1]
    return model


def block_in_three_places() -> nn.Module:
    model = Net()
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    return model


def parameter_hook() -> nn.Module:
    model = Net()
    model.first.weight.register_hook(lambda gradient: gradient * 0.1)
    return model


def forward_hook() -> nn.Module:
    model = Net()
    model.blocks[1].register_forward_hook(lambda module, given, made: made * 0.5)
    return model


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def low_rank() -> nn.Module:
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up = LowRank(block.up)
    return model


def module_hook() -> nn.Module:
    model = Net()
    model.blocks[1].register_full_backward_hook(lambda module, given, made: None)
    return model


def module_pre_hook() -> nn.Module:
    model = Net()
    model.blocks[2].register_full_backward_pre_hook(lambda module, gradients: None)
    return model


class Cast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


REENTRANT = partial(Net, lambda self, block, x: checkpoint(block, x, use_reentrant=True))
KEPT: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "function bound before": lambda: Net(lambda self, block, x: block(scaled(x, 0.5))),
    "straight-through weights": lambda: Net(rounded),
    "function with context": lambda: Net(gated),
    "checkpointed": lambda: Net(lambda self, block, x: checkpoint(block, x, use_reentrant=False)),
    "reentrant": REENTRANT,
    # Torch gives the first block no gradients either.
    "reentrant without gradient": lambda: first_layer_frozen(REENTRANT()),
    "autocast off": lambda: Net(with_autocast("cpu", enabled=False)),
    "compiled blocks": compiled_blocks,
    "compiled whole": lambda: torch.compile(Net()),
    "shared block": shared_block,
    "block in three places": block_in_three_places,
    "parameter hook": parameter_hook,
    "forward hook": forward_hook,
    "low rank": low_rank,
    "recurrent": lambda: Net(
        lambda self, block, x: self.lstm(x[None])[0][0] + block(x), lstm=nn.LSTM(WIDTH, WIDTH)
    ),
    "cached constant": lambda: Net(scaled_by_what_the_first_call_made),
}
LOW = {"dtype": torch.bfloat16}
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "module hook": (
        module_hook,
        ("module 'blocks.1' (Block) has a backward hook", "a hook on a parameter"),
    ),
    "module pre-hook": (module_pre_hook, ("module 'blocks.2' (Block) has a backward hook",)),
    "tensor hook": (
        lambda: Net(hooked),
        ("forward registers a hook on a tensor", "feature_models.py:"),
    ),
    "autocast": (Cast, ("forward switches on torch.autocast", 'precision = "bfloat16"')),
    "autocast of another device": (
        lambda: Net(with_autocast("cuda", **LOW)),
        ("forward switches on torch.autocast",),
    ),
    "autocast decorated": (
        lambda: Net(torch.autocast("cpu", **LOW)(lambda self, block, x: block(x).float())),
        ("forward switches on torch.autocast",),
    ),
    "Python's random": (
        lambda: Net(lambda self, block, x: x + float(random.random() < 0.5) * block(x)),
        ("forward draws with Python's random", "draw with torch"),
    ),
    "numpy's random": (
        lambda: Net(lambda self, block, x: x + float(np.random.rand()) * block(x)),
        ("forward draws with Python's numpy.random",),
    ),
    "generator of its own": (
        lambda: Net(
            lambda self, block, x: x + float(self.coin.random() < 0.5) * block(x),
            coin=random.Random(0),
        ),
        ("forward keeps coin from call to call", "draw with torch"),
    ),
    "counter": (
        lambda: Net(warmed_up, calls=0),
        ("forward keeps calls from call to call", "register_buffer"),
    ),
    "counter in a list": (
        lambda: Net(counted, history=[]),
        ("forward keeps history from call to call",),
    ),
    "plain constant": (
        lambda: Net(lambda self, block, x: block(x) * self.scale, scale=torch.ones(WIDTH)),
        ("scale is a tensor in a plain attribute", "register_buffer"),
    ),
    "kept state": (
        lambda: Net(remembered, memory=[torch.zeros(WIDTH)]),
        ("memory is a tensor in a plain attribute", "register_buffer"),
    ),
    "clamped weight": (
        lambda: Net(clamped),
        ("writes into the parameter 'blocks.0.up.weight'", "parametrize"),
    ),
    "clamped data": (
        lambda: Net(clamped_data),
        ("writes into the parameter 'blocks.0.up.weight'",),
    ),
    "momentum encoder": (
        lambda: Net(
            followed,
            fast=nn.Linear(WIDTH, WIDTH),
            slow=nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        ),
        ("writes into the parameter 'slow.weight'", "make it a buffer"),
    ),
    "function in place": (
        lambda: Net(lambda self, block, x: InPlace.apply(block(x))),
        ("autograd Function InPlace", "mark_dirty"),
    ),
    "function that draws": (
        lambda: Net(lambda self, block, x: Drawing.apply(block(x))),
        ("autograd Function Drawing", "draws random numbers"),
    ),
    "function of a list": (
        lambda: Net(lambda self, block, x: Listed.apply([x, block(x)])),
        ("autograd Function Listed", "inside a list"),
    ),
    "routed experts": (
        lambda: Net(routed, gate=nn.Linear(WIDTH, 2)),
        ("feature_models.py:", "planner.tracing.expert_operations"),
    ),
    "branch on data": (
        lambda: Net(lambda self, block, x: block(x) if (x > 0).any() else x),
        ("feature_models.py:", "choose with torch.where"),
    ),
    "torch's coin in Python": (
        lambda: Net(lambda self, block, x: x if torch.rand(()).item() < 0.1 else block(x)),
        ("feature_models.py:", "choose with torch.where"),
    ),
    "converted in forward": (
        lambda: Net(lambda self, block, x: block.to(torch.float32)(x)),
        ("converts the weights of Block", "when the model is built"),
    ),
}
