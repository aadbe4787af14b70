"""Models with gradients of their own: Functions, hooks, checkpoints, autocast, compile."""

from typing import Any

import torch
from fidelity_base import KINDS, WIDTH, Block, Model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

# --- custom Functions -----------------------------------------------------------------------------


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign() * weight.abs().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Swish(torch.autograd.Function):
    """Keeps its input alone; two results, of which one is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        signs = x > 0
        ctx.mark_non_differentiable(signs)
        return x * x.sigmoid(), signs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


class _Renewed(torch.autograd.Function):
    """The newer form, with setup_context; two operands."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1)) * 0.5


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3.0


class _Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Listed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensors: list[Tensor]) -> Tensor:
        return tensors[0] + tensors[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


_scaled = _Scale.apply  # Bound before any trace.


class GradientScale(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](_scaled(x, 0.5))


class GradientReversal(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return (
            super().block(number, x) if number % 2 else super().block(number, _Scale.apply(x, -1.0))
        )


class _SignBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        up = functional.linear(self.norm(x), _StraightThrough.apply(self.up.weight), self.up.bias)
        return x + self.down(functional.gelu(up))


class SignWeights(Model):
    make_block = _SignBlock


class _SwishBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        value, signs = _Swish.apply(self.up(self.norm(x)))
        return x + self.down(torch.where(signs, value, value * 0.5))


class OwnActivation(Model):
    make_block = _SwishBlock


class _ScaledBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Renewed.apply(x, self.scale))


class OwnProduct(Model):
    make_block = _ScaledBlock


class DirtyFunction(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return super().block(number, _Doubled.apply(x * 1.0))


class DrawingFunction(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return super().block(number, _Drawing.apply(x))


class FunctionOfAList(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return _Listed.apply([x, super().block(number, x)])


class GradientInside(Model):
    """A penalty on the gradient of the output by the input, by autograd.grad inside forward."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        (slope,) = torch.autograd.grad(self.head(x).sum(), x, create_graph=True)
        return self.head(x) + slope.square().mean()


# --- hooks ----------------------------------------------------------------------------------------


class ModuleBackwardHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,))


class ModuleBackwardPreHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,))


class TensorHook(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        x = super().block(number, x)
        if x.requires_grad and number == 1:
            x.register_hook(lambda gradient: gradient * 0.1)
        return x


class ParameterHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.emb.weight.register_hook(lambda gradient: gradient * 0.1)
        self.blocks[2].up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class PostAccumulateHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.weight.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


class ForwardHooks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(lambda module, given, out: out * 0.5)
        self.blocks[2].register_forward_pre_hook(lambda module, given: (given[0] + 1.0,))


# --- checkpoints, autocast, compile ---------------------------------------------------------------


class Checkpoints(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=False)


class ReentrantCheckpoints(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=True)


class ReentrantBehindFrozen(ReentrantCheckpoints):
    """Torch gives the first block no gradients either, since nothing before it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.emb.requires_grad_(False)


class SequentialCheckpoints(Model):
    def hidden(self, ids: Tensor) -> Tensor:
        return checkpoint_sequential(
            nn.Sequential(*self.blocks), 2, self.emb(ids), use_reentrant=False
        )


class Autocast(Model):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(ids).float()


class AutocastOfAnotherDevice(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return super().block(number, x).float()


class AutocastDecorator(Model):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).float()


class AutocastOff(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().block(number, x)


class AutocastParts(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 1):
            return super().block(number, x).float()


class CompiledBlocks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(block) for block in self.blocks)


class CompiledInPlace(Model):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile()


def compiled_whole() -> nn.Module:
    return torch.compile(Model())


class HalfInside(Model):
    """A block that computes in 16 bits by explicit conversions."""

    def block(self, number: int, x: Tensor) -> Tensor:
        if number != 1:
            return super().block(number, x)
        return functional.linear(x.bfloat16(), self.blocks[1].up.weight.bfloat16())[
            ..., :WIDTH
        ].float()


class OwnLoss(Model):
    """Returns its loss itself, with an auxiliary one."""

    loss = "output"

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.hidden(ids)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())
        return loss + 0.01 * x.square().mean()


class MissingTargets(Model):
    """Half of the targets do not count, the same number in every microbatch."""

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        batch = super().example_batch(samples)
        batch["target"] = batch["target"].clone()
        batch["target"][:, ::2] = -100
        return batch


class Detached(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        x = x * 0.1 + x.detach() * 0.9
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithoutGradientInside(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean() + self.blocks[number].up.weight.abs().mean()
        return super().block(number, x) * scale


class WithGradientInsideNoGradient(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2.0
            with torch.enable_grad():
                z = super().block(number, x)
        return z + y


class Counted(Model):
    """Targets by their frequency in the microbatch."""

    def forward(self, ids: Tensor) -> Tensor:
        counts = functional.one_hot(ids, KINDS).sum((0, 1)).clamp(min=1)
        return super().forward(ids) / counts
