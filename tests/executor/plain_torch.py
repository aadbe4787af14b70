"""The training that a training file describes, in plain torch on one process."""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from executor.launch.config import TrainingConfig
from executor.launch.model import allowed_loss
from executor.stage.random_numbers import microbatch_seed
from executor.training.batches import BatchOf, batches
from planner.plan.plan import Plan
from planner.tracing.factory import TrainingStep, import_factory

Named = dict[str, Tensor]


class Alone:
    """Trains the whole model; low-precision weights have float32 masters.

    Args:
        plan: its model, job and number of microbatches count, its stages do not.
        config: learning rate, schedule, clipping, autocast and seed.
        loss: the plan's own loss, if it has one.
        batch_of: default random batches.
        optimizer: over the job's.
    """

    def __init__(
        self,
        plan: Plan,
        config: TrainingConfig,
        loss: str | None = None,
        batch_of: BatchOf | None = None,
        optimizer: object = None,
    ) -> None:
        torch.manual_seed(config.seed)
        np.random.seed(config.seed)
        random.seed(config.seed)
        assert plan.model.factory is not None
        model = import_factory(plan.model.factory)(**plan.model.arguments).train()
        self.plan, self.config = plan, config
        self.dtype = getattr(torch, plan.job.precision)
        self.model = model.to(self.dtype)
        self.step_of = TrainingStep(self.model, plan.job.loss, allowed_loss(plan, loss))
        self.batch_of = batch_of or batches("random", self.model, plan.job, config.seed)
        self.low = self.dtype in (torch.float16, torch.bfloat16)
        self.masters = {
            name: nn.Parameter(p.detach().float()) if self.low else p
            for name, p in self.model.named_parameters()
        }
        self.optimizer = optimizer(self.masters) if optimizer else self._job_optimizer()
        self.factor = config.rate_factor()
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.scale = 1.0

    def _job_optimizer(self) -> torch.optim.Optimizer:
        job, arguments = self.plan.job, self.config.optimizer_arguments
        rate = self.config.learning_rate or job.learning_rate
        if job.optimizer == "adamw":
            return torch.optim.AdamW(self.masters.values(), lr=rate, **arguments)
        return torch.optim.SGD(self.masters.values(), lr=rate, momentum=0.9, **arguments)

    def train(self, steps: int) -> list[float]:
        return [self.step(step) for step in range(1, steps + 1)]

    def step(self, step: int) -> float:
        self.model.zero_grad(set_to_none=True)
        total = sum(self._microbatch(step, number) for number in range(self.plan.microbatches))
        for name, p in self.model.named_parameters():
            if self.low:
                self.masters[name].grad = p.grad.float() / self.scale
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.factor(step)
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.masters.values(), self.config.clip_norm)
        self.optimizer.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters() if self.low else ():
                p.copy_(self.masters[name])
        return total / self.plan.microbatches

    def _microbatch(self, step: int, number: int) -> float:
        torch.manual_seed(microbatch_seed(self.config.seed, step, number))
        dtype = torch.bfloat16 if self.config.autocast else None
        with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
            loss = self.step_of(**self.batch_of(step, number))
        (loss * (self.scale / self.plan.microbatches)).backward()
        return float(loss.detach().double())

    def parameters(self) -> Named:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def worst_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Norm of the error over norm of the tensor, of the worst tensor."""
    assert set(found) == set(expected)
    return max(
        float((found[name].double() - x.double()).norm() / x.double().norm().clamp(min=1e-12))
        for name, x in expected.items()
    )
