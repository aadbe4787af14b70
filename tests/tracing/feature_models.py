"""Small models, each with one thing that people write and export drops, by the name of a function.

``REFUSED`` has the words of the refusal, ``KEPT`` those whose exported step trains as eager torch.
"""

import random
from collections.abc import Callable

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
    """Three blocks; ``between`` is what a model does around each of them."""

    def __init__(self, between: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.between = between or (lambda self, block, x: block(x))

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


# --- kept -----------------------------------------------------------------------------------------


def plain() -> nn.Module:
    return Net()


def function_bound_before() -> nn.Module:
    return Net(lambda self, block, x: block(scaled(x, 0.5)))


def straight_through_weights() -> nn.Module:
    def rounded(self, block, x):
        return (
            x + functional.linear(block.norm(x), Rounded.apply(block.down.weight.t()))[..., :WIDTH]
        )

    return Net(rounded)


def function_with_context() -> nn.Module:
    def gated(self, block, x):
        product, sign = WithContext.apply(x, block(x))
        return product + sign * block.norm.weight

    return Net(gated)


def checkpointed() -> nn.Module:
    return Net(lambda self, block, x: checkpoint(block, x, use_reentrant=False))


def reentrant() -> nn.Module:
    return Net(lambda self, block, x: checkpoint(block, x, use_reentrant=True))


def reentrant_without_gradient() -> nn.Module:
    """Its first layer is frozen, so torch gives the first block no gradients either."""
    model = reentrant()
    model.first.requires_grad_(False)
    return model


def autocast_off() -> nn.Module:
    def off(self, block, x):
        with torch.autocast(x.device.type, enabled=False):
            return block(x)

    return Net(off)


def compiled_blocks() -> nn.Module:
    model = Net()
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block)
    model.head.compile()
    return model


def compiled_whole() -> nn.Module:
    return torch.compile(Net())


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


def torch_random() -> nn.Module:
    return Net(lambda self, block, x: torch.where(torch.rand(()) < 0.5, x, block(x)))


def low_rank() -> nn.Module:
    class LowRank(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 2 * WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up = LowRank(block.up)
    return model


def recurrent() -> nn.Module:
    model = Net(lambda self, block, x: self.lstm(x[None])[0][0] + block(x))
    model.lstm = nn.LSTM(WIDTH, WIDTH)
    return model


def cached_constant() -> nn.Module:
    """Makes a number once, at the first call."""

    def cached(self, block, x):
        if not hasattr(self, "scale"):
            self.scale = x.shape[-1] ** -0.5
        return x + self.scale * block(x)

    return Net(cached)


KEPT = (
    plain,
    function_bound_before,
    straight_through_weights,
    function_with_context,
    checkpointed,
    reentrant,
    reentrant_without_gradient,
    autocast_off,
    compiled_blocks,
    compiled_whole,
    shared_block,
    block_in_three_places,
    parameter_hook,
    forward_hook,
    low_rank,
    recurrent,
    cached_constant,
)


# --- refused --------------------------------------------------------------------------------------


def module_hook() -> nn.Module:
    model = Net()
    model.blocks[1].register_full_backward_hook(lambda module, given, made: None)
    return model


def module_pre_hook() -> nn.Module:
    model = Net()
    model.blocks[2].register_full_backward_pre_hook(lambda module, gradients: None)
    return model


def tensor_hook() -> nn.Module:
    def hooked(self, block, x):
        x.register_hook(lambda gradient: gradient * 0.1)
        return block(x)

    return Net(hooked)


def autocast_on() -> nn.Module:
    class Cast(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    return Cast()


def autocast_of_another_device() -> nn.Module:
    def on(self, block, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return block(x).float()

    return Net(on)


def autocast_decorated() -> nn.Module:
    return Net(torch.autocast("cpu", dtype=torch.bfloat16)(lambda self, block, x: block(x).float()))


def python_random() -> nn.Module:
    return Net(lambda self, block, x: x + float(random.random() < 0.5) * block(x))


def numpy_random() -> nn.Module:
    return Net(lambda self, block, x: x + float(np.random.rand()) * block(x))


def own_generator() -> nn.Module:
    model = Net(lambda self, block, x: x + float(self.coin.random() < 0.5) * block(x))
    model.coin = random.Random(0)
    return model


def counter() -> nn.Module:
    def warmed_up(self, block, x):
        self.calls += 1
        return x + min(1.0, self.calls / 1000) * block(x)

    model = Net(warmed_up)
    model.calls = 0
    return model


def counter_in_a_list() -> nn.Module:
    def counted(self, block, x):
        self.history.append(len(self.history))
        return block(x) if len(self.history) % 9 else x

    model = Net(counted)
    model.history = []
    return model


def plain_constant() -> nn.Module:
    model = Net(lambda self, block, x: block(x) * self.scale)
    model.scale = torch.ones(WIDTH)
    return model


def kept_state() -> nn.Module:
    def kept(self, block, x):
        x = block(x) + self.memory[0]
        self.memory[0] = x.detach().mean(0)
        return x

    model = Net(kept)
    model.memory = [torch.zeros(WIDTH)]
    return model


def clamped_weight() -> nn.Module:
    def clamped(self, block, x):
        with torch.no_grad():
            block.up.weight.clamp_(-0.1, 0.1)
        return block(x)

    return Net(clamped)


def clamped_data() -> nn.Module:
    def clamped(self, block, x):
        block.up.weight.data.clamp_(-0.1, 0.1)
        return block(x)

    return Net(clamped)


def momentum_encoder() -> nn.Module:
    def followed(self, block, x):
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(self.fast.weight, alpha=0.1)
        return block(x) + self.fast(x) + self.slow(x)

    model = Net(followed)
    model.fast, model.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.slow.requires_grad_(False)
    return model


def function_in_place() -> nn.Module:
    return Net(lambda self, block, x: InPlace.apply(block(x)))


def function_that_draws() -> nn.Module:
    return Net(lambda self, block, x: Drawing.apply(block(x)))


def function_of_a_list() -> nn.Module:
    return Net(lambda self, block, x: Listed.apply([x, block(x)]))


def routed_experts() -> nn.Module:
    def routed(self, block, x):
        rows = torch.where(self.gate(x).argmax(-1) == 0)[0]
        return x.index_add(0, rows, block(x[rows]))

    model = Net(routed)
    model.gate = nn.Linear(WIDTH, 2)
    return model


def branch_on_data() -> nn.Module:
    return Net(lambda self, block, x: block(x) if (x > 0).any() else x)


def coin_of_torch_in_python() -> nn.Module:
    return Net(lambda self, block, x: x if torch.rand(()).item() < 0.1 else block(x))


def converted_in_forward() -> nn.Module:
    return Net(lambda self, block, x: block.to(torch.float32)(x))


REFUSED = {
    module_hook: ("module 'blocks.1' (Block) has a backward hook", "a hook on a parameter"),
    module_pre_hook: ("module 'blocks.2' (Block) has a backward hook",),
    tensor_hook: ("forward registers a hook on a tensor", "feature_models.py:"),
    autocast_on: ("forward switches on torch.autocast", 'precision = "bfloat16"'),
    autocast_of_another_device: ("forward switches on torch.autocast",),
    autocast_decorated: ("forward switches on torch.autocast",),
    python_random: ("forward draws with Python's random", "draw with torch"),
    numpy_random: ("forward draws with Python's numpy.random",),
    own_generator: ("forward keeps coin from call to call", "draw with torch"),
    counter: ("forward keeps calls from call to call", "register_buffer"),
    counter_in_a_list: ("forward keeps history from call to call",),
    plain_constant: ("scale is a tensor in a plain attribute", "register_buffer"),
    kept_state: ("memory is a tensor in a plain attribute", "register_buffer"),
    clamped_weight: ("writes into the parameter 'blocks.0.up.weight'", "parametrize"),
    clamped_data: ("writes into the parameter 'blocks.0.up.weight'",),
    momentum_encoder: ("writes into the parameter 'slow.weight'", "make it a buffer"),
    function_in_place: ("autograd Function InPlace", "mark_dirty"),
    function_that_draws: ("autograd Function Drawing", "draws random numbers"),
    function_of_a_list: ("autograd Function Listed", "inside a list"),
    routed_experts: ("feature_models.py:", "planner.tracing.expert_operations"),
    branch_on_data: ("feature_models.py:", "choose with torch.where"),
    coin_of_torch_in_python: ("feature_models.py:", "choose with torch.where"),
    converted_in_forward: ("converts the weights of Block", "when the model is built"),
}
