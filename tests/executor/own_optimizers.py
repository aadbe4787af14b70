"""Kinds of optimizers that torch lacks, in a few lines; real packages are extensive tests."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

Pairs = Sequence[tuple[str, nn.Parameter]]


class PerParameter(Optimizer):
    """Steps on each parameter by itself; a subclass says by how much."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.change(p, p.grad, self.state[p]))


class EightBit(PerParameter):
    """Dettmers et al. 2022: momenta in 8 bits, in blocks with a scale each."""

    def change(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        blocks = torch.zeros(-(-p.numel() // 64), 64, dtype=p.dtype)
        codes = state.setdefault("codes", torch.zeros_like(blocks, dtype=torch.int8))
        scales = state.setdefault("scales", torch.zeros(len(blocks), 1, dtype=p.dtype))
        blocks.view(-1)[: p.numel()] = g.reshape(-1)
        blocks.add_(codes.to(p.dtype) * scales, alpha=0.9)
        scales.copy_(blocks.abs().amax(1, keepdim=True) / 127)
        codes.copy_(torch.round(blocks / scales.clamp(1e-12)))
        return (codes.to(p.dtype) * scales).view(-1)[: p.numel()].view(p.shape)


class ScheduleFree(Optimizer):
    """Defazio et al. 2024: an average of iterates, counted in the group; steps in training mode."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "training": False})

    def train(self) -> None:
        for group in self.param_groups:
            group["training"] = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            group["count"] += 1
            for p in group["params"]:
                state = self.state[p]
                z = state.setdefault("z", p.clone())
                x = state.setdefault("x", p.clone())
                z.sub_(group["lr"] * p.grad)
                x.lerp_(z, 1 / group["count"])
                p.copy_(z.lerp(x, 0.9))


class Prodigy(Optimizer):
    """Mishchenko and Defazio 2024: one step size ``d`` from what all parameters saw."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "top": 0.0, "bottom": None})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            d = group["d"]
            for p in group["params"]:
                state = self.state[p]
                first = state.setdefault("first", p.clone())
                total = state.setdefault("total", torch.zeros_like(p))
                group["top"] += d * float(torch.sum(p.grad * (first - p)))
                total.add_(p.grad, alpha=d)
            sums = [self.state[p]["total"].abs().sum() for p in group["params"]]
            group["bottom"] = float(sum(sums)) or None
            if group["bottom"] is not None:
                group["d"] = max(d, group["top"] / group["bottom"])
            for p in group["params"]:
                p.sub_(group["lr"] * group["d"] * p.grad)


class Clipping(SGD):
    """Clips the norm over all parameters inside of its step."""

    def step(self, closure: None = None) -> None:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        super().step()


class Counting(SGD):
    """Keeps what it needs where no checkpoint looks."""

    calls = 0

    def step(self, closure: None = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(self.calls)
        super().step()


class MatricesAndOthers(Muon):
    """Muon for matrices, SGD for what it does not take."""

    def __init__(self, pairs: Pairs, lr: float) -> None:
        matrices = [p for _, p in pairs if p.ndim == 2]
        self.others = [p for _, p in pairs if p.ndim != 2]
        super().__init__(matrices or [nn.Parameter(torch.zeros(1, 1))], lr=lr)
        if self.others:
            self.param_groups.append({**self.param_groups[0], "params": self.others})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        groups = self.param_groups
        self.param_groups = groups[:1]
        super().step()
        self.param_groups = groups
        for p in self.others:
            if p.grad is not None:
                p.sub_(p.grad, alpha=groups[0]["lr"])


def _plain(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    return lambda pairs, lr: kind([p for _, p in pairs], lr=lr)


def groups(pairs: Pairs, lr: float) -> Optimizer:
    """AdamW that decays matrices only."""
    rows = [([p for _, p in pairs if (p.ndim > 1) == decays], decays) for decays in (True, False)]
    return AdamW([{"params": p, "weight_decay": 0.1 * decays} for p, decays in rows if p], lr=lr)


adamw, sgd, adafactor, eight_bit, schedule_free, prodigy, clipping, counting = map(
    _plain, (AdamW, SGD, Adafactor, EightBit, ScheduleFree, Prodigy, Clipping, Counting)
)
muon = MatricesAndOthers
