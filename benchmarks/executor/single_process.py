"""A single process in plain torch, and how far the ranks of a plan are from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from executor.stage.random_numbers import microbatch_seed
from executor.sync.shared_parameters import planned_split
from executor.training.batches import BatchOf, batches
from executor.training.optimizer import job_optimizer
from planner.plan.plan import Plan
from planner.tracing.factory import TrainingStep, build, import_factory
from planner.tracing.sharding.local import join

CPU = torch.device("cpu")
SEED = 7
STEPS = 2
"""Iterations of a random plan."""
# A gradient that is zero but for rounding, such as that of a bias in front of a normalisation
# which takes the mean away again, has no digits to compare: its error is taken relative to a
# thousandth of the largest gradient's norm. It so counts for no more than it is of the whole.
LEAST_SHARE = 1e-3
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
# Float32 has no such digits where a model is ill-conditioned: the gradients of Inception's branches
# add up in another order in another order of stages, and normalisations magnify the rounding. A
# gradient beyond the tolerance passes only if plain torch's own is as far from that in float64.
OWN_ROUNDING = 2.0
SAME_MASKS = 1e-5  # Of losses; dropout that drew others in float64 would excuse anything.
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Held:
    """A rank's weights and gradients after an iteration, by the model's own names.

    Attributes:
        loss: the mean over all microbatches.
        gradients: None where plain torch should have none.
        buffers: of its stages.
        parameters: after the optimizer step.
    """

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: Named
    parameters: Named


@dataclass
class Errors:
    """The differences from a single process: relative errors in the Euclidean norm.

    Attributes:
        loss: of the mean loss.
        tensor: of a parameter's gradient, the largest.
        whole: of the gradients of all parameters as one vector.
        buffer: of a buffer, the largest.
        update: of a parameter after the optimizer's step by the gradients found.
        excess: the largest of the gradients' errors over what is allowed: of all as one vector the
            tolerance, of a tensor twice plain torch's own error against float64 if that is more.
        own: plain torch's own error against float64, the largest; 0 where nobody had to ask.
        worst: the parameter of the largest error.
        problems: what is no matter of rounding.
    """

    loss: float = 0.0
    tensor: float = 0.0
    whole: float = 0.0
    buffer: float = 0.0
    update: float = 0.0
    excess: float = 0.0
    own: float = 0.0
    worst: str = ""
    problems: list[str] = field(default_factory=list)


def batch_source(plan: Plan, model: nn.Module) -> BatchOf:
    """Random batches, the same on every rank."""
    return batches("random", model, plan.job, SEED)


def joined(plan: Plan, ranks: list[Held]) -> list[Held]:
    """Return what ranks hold, parts of gradients and shares of groups put together."""
    if plan.job.shards_state:
        ranks = _with_parts(plan, ranks)

    def of_group(held: list[dict]) -> list[dict]:
        split = planned_split(plan, len(held))
        shared = {}
        for name, place in ({} if split is None else split.parameters).items():
            tensors = [row[name] for row in held if row.get(name) is not None]
            if name in held[0]:
                is_whole = len(tensors) == len(held)
                shared[name] = join(tensors, place.dimension, place.parts) if is_whole else None
        return [{**row, **shared} for row in held]

    found = []
    for name in plan.ranks:
        group = [ranks[rank] for rank in plan.ranks_of(name)]
        gradients = of_group([row.gradients for row in group])
        parameters = of_group([row.parameters for row in group])
        for row, own, after in zip(group, gradients, parameters, strict=True):
            found.append(replace(row, gradients=own, parameters=after))
    return found


def _with_parts(plan: Plan, ranks: list[Held]) -> list[Held]:
    """Put together gradients of which each rank of a place in its group has the sum of a part."""
    found = []
    for rank, own in enumerate(ranks):
        place = plan.place_of(rank)
        others = [
            row.gradients
            for other, row in enumerate(ranks)
            if plan.place_of(other)[1:] == place[1:]
        ]
        gradients = dict(own.gradients)
        for name, gradient in own.gradients.items():
            for row in others if gradient is not None else ():
                part = row.get(name)
                if part is not None:
                    gradient = torch.where(gradient.isnan(), part, gradient)
            gradients[name] = gradient
        found.append(replace(own, gradients=gradients))
    return found


# --- a single process ------------------------------------------------------------------------


class Alone:
    """The same training in plain torch: one process, no stages, one microbatch after another.

    Args:
        plan: Its model, job and microbatches count.
        device: Where the model is.
        precision: Type of the weights; None: the job's. All precisions begin with the same values.
        autocast: What torch's autocast lowers operations to; None: nothing.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device = CPU,
        precision: str | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.plan = plan
        torch.manual_seed(SEED)
        assert plan.model.factory is not None
        model = build(import_factory(plan.model.factory), plan.model.arguments)
        self.model = model.train().to(getattr(torch, plan.job.precision))
        self.batch_of = batch_source(plan, self.model)
        self.model = self.model.to(device, getattr(torch, precision or plan.job.precision))
        self.parameters = dict(self.model.named_parameters())
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = job_optimizer(plan.job, trained)
        self._device, self._autocast = device, autocast

    def forward_backward(self, step: int) -> float:
        """The mean loss; gradients are in the parameters after it."""
        self.model.zero_grad(set_to_none=True)
        training_step = TrainingStep(self.model, self.plan.job.loss)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for microbatch in range(self.plan.microbatches):
            batch = self._moved(self.batch_of(step, microbatch))
            torch.manual_seed(microbatch_seed(SEED, step, microbatch))
            kind, lowered = self._device.type, self._autocast
            with torch.autocast(kind, lowered, enabled=lowered is not None):
                loss = training_step(**batch) / self.plan.microbatches
            loss.backward()
            total += loss.detach()
        return total.item()

    def _moved(self, batch: Mapping[str, Tensor]) -> Named:
        if self._device.type == "cuda":
            pinned = {name: x.pin_memory() for name, x in batch.items()}
            batch = {name: x.to(self._device, non_blocking=True) for name, x in pinned.items()}
        own = next(iter(self.parameters.values())).dtype
        return {name: x.to(own) if x.is_floating_point() else x for name, x in batch.items()}

    def iterate(self, step: int) -> float:
        """Run an iteration with the optimizer's own step; return the mean loss."""
        loss = self.forward_backward(step)
        self.optimizer.step()
        return loss

    def gradients(self) -> Named:
        """Return the last iteration's gradients that exist."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def update(self, gradients: Mapping[str, Tensor | None]) -> None:
        """The optimizer's step by these gradients, not by its own."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        self.optimizer.step()

    @torch.no_grad()
    def take(self, parameters: Mapping[str, Tensor]) -> None:
        """Go on from these, so that each iteration is compared by itself.

        An optimizer can magnify rounding: Adam moves a parameter by the sign of a gradient that is
        zero but for rounding.
        """
        for name, value in parameters.items():
            self.parameters[name].copy_(value)


# --- comparing -------------------------------------------------------------------------------


def compare(plan: Plan, iterations: list[list[Held]]) -> Errors:
    """All ranks' iterations with those of a single process."""
    errors, alone = Errors(), Alone(plan)
    for step, ranks in enumerate(iterations, start=1):
        loss = alone.forward_backward(step)
        errors.loss = max(errors.loss, abs(ranks[0].loss / loss - 1))
        gradients = _of_all([rank.gradients for rank in ranks], f"{step}: gradient of", errors)
        _compare_gradients(gradients, alone, step, loss, errors)
        buffers = _of_all([rank.buffers for rank in ranks], f"{step}: buffer", errors)
        _compare_buffers(buffers, alone, errors)
        alone.update(gradients)
        parameters = _of_all([rank.parameters for rank in ranks], f"{step}: parameter", errors)
        for name, value in parameters.items():
            error = _distance(value, alone.parameters[name]) / _norm(value, 1e-30)
            errors.update = max(errors.update, error)
        alone.take(parameters)
    return errors


def error_of_training(plan: Plan, iterations: list[list[Held]]) -> float:
    """The error after a training as a whole, in which nothing was set right on the way.

    Returns:
        The largest relative error of a loss, or of a weight after the last iteration; small
        weights count as gradients do (:data:`LEAST_SHARE`).
    """
    alone = Alone(plan)
    worst = 0.0
    for step, ranks in enumerate(iterations, start=1):
        worst = max(worst, abs(ranks[0].loss / alone.iterate(step) - 1))
    found = {name: value for held in iterations[-1] for name, value in held.parameters.items()}
    expected = {name: parameter.detach() for name, parameter in alone.parameters.items()}
    return max(worst, *Distances.of(found, expected).tensors.values())


def _of_all(ranks: list[dict], what: str, errors: Errors) -> dict:
    """Each tensor once; all that hold it must have the same, bit by bit."""
    found: dict[str, Tensor | None] = {}
    for held in ranks:
        for name, tensor in held.items():
            if name in found and not _same(found[name], tensor):
                errors.problems.append(f"step {what} {name}: its holders differ")
            found.setdefault(name, tensor)
    return found


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.equal(second)


def _compare_gradients(
    found: Mapping[str, Tensor | None], alone: Alone, step: int, loss: float, errors: Errors
) -> None:
    expected = alone.gradients()
    for name in alone.parameters.keys() ^ found.keys():
        who = "no" if name in alone.parameters else "a strange"
        errors.problems.append(f"{name}: held by {who} rank")
    for name, gradient in found.items():
        if (gradient is None) != (name not in expected):
            errors.problems.append(f"{name}: gradient is {_shown(gradient)}, expected the other")
    both = {name: g for name, g in found.items() if g is not None and name in expected}
    distances = Distances.of(both, expected)
    for name, error in distances.tensors.items():
        if error > errors.tensor:
            errors.tensor, errors.worst = error, name
    errors.whole = max(errors.whole, distances.whole)
    errors.excess = max(errors.excess, _excess(distances, alone, step, loss, errors))


def _excess(distances: Distances, alone: Alone, step: int, loss: float, errors: Errors) -> float:
    bar = TOLERANCE[alone.plan.job.precision]
    largest = max(distances.whole, *distances.tensors.values())
    if largest <= bar or alone.plan.job.precision == "float64":
        return largest / bar
    own = _own_rounding(alone, step, loss)
    errors.own = max(errors.own, own.whole, *own.tensors.values())
    allowed = {name: max(bar, OWN_ROUNDING * error) for name, error in own.tensors.items()}
    return max(
        distances.whole / bar,
        *(error / allowed[name] for name, error in distances.tensors.items()),
    )


def _own_rounding(alone: Alone, step: int, loss: float) -> Distances:
    """Return how far the single process is from a float64 computation."""
    job = alone.plan.job.model_copy(update={"precision": "float64"})
    exact = Alone(alone.plan.model_copy(update={"job": job}))
    exact.take(alone.parameters)
    if abs(exact.forward_backward(step) - loss) > SAME_MASKS * abs(loss):
        return Distances.none(alone.gradients())
    return Distances.of(alone.gradients(), exact.gradients())


@dataclass(frozen=True)
class Distances:
    """Relative errors of gradients: of each tensor, and of all as one vector."""

    tensors: Mapping[str, float]
    whole: float

    @classmethod
    def of(cls, found: Named, expected: Named) -> Distances:
        """See :data:`LEAST_SHARE`."""
        norms = {name: _norm(expected[name], 0.0) for name in expected}
        least = LEAST_SHARE * max(norms.values())
        distances = {name: _distance(g, expected[name]) for name, g in found.items()}
        return cls(
            {name: d / max(norms[name], least) for name, d in distances.items()},
            math.hypot(*distances.values()) / math.hypot(*norms.values()),
        )

    @classmethod
    def none(cls, gradients: Named) -> Distances:
        """No error at all."""
        return cls(dict.fromkeys(gradients, 0.0), 0.0)


def _shown(gradient: Tensor | None) -> str:
    return "None" if gradient is None else "a tensor"


def _compare_buffers(found: Named, alone: Alone, errors: Errors) -> None:
    expected = dict(alone.model.named_buffers())
    for name, buffer in found.items():
        if name not in expected:
            continue  # A constant of the model's code, which the export made a buffer.
        if not buffer.is_floating_point():
            if not buffer.equal(expected[name]):
                errors.problems.append(f"{name}: {buffer} is not {expected[name]}")
            continue
        error = _distance(buffer, expected[name]) / _norm(expected[name], 1e-30)
        errors.buffer = max(errors.buffer, error)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach().double()).norm())


def _norm(tensor: Tensor, least: float) -> float:
    return max(float(tensor.double().norm()), least)
