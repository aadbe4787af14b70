"""Whether an optimizer of the user's own does on several ranks what it does on one process.

It is tried on small synthetic parameters of the same names and numbers of dimensions: once on all
of them, and once as the ranks of a plan would run it, each on its part.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from executor.distributed.member_group import member_shares
from executor.launch.prepare import Prepared
from executor.stage.random_numbers import own_draws
from executor.sync.shared_parameters import planned_split
from executor.training.master_weights import MakeOptimizer
from executor.training.optimizer import export_state, groups_of, import_state, optimizer_name
from planner.errors import PipeplanError
from planner.tracing.user_code import FAILURES, one_line

Weights = dict[str, Tensor]
STEP_BY_PART = frozenset({"decoupled", "cross_iteration"})
"""Strategies that let one optimizer step on some parameters after the other."""
SERVED = frozenset({"parameter_server", "eager_parameter_server"})
"""Strategies whose servers each step on some of the parameters."""
_SIZE, _SHARED_SIZE, _OTHERS = 12, (96, 64), 3
_LARGE = 96 * 64
"""Elements from which some optimizers keep their state in 8 bits."""
_WEIGHTS = 1e-8
"""Size of the weights: so small that float32 shows how steps of any size differ."""
_SCALES = (1.0, 1.0, 1.0, 1e3, 1e3, 1e-3, 1e3)
"""Of the gradients of the steps: clipping has to act in some, and no step size to stay."""
_TOLERANCE = 1e-4
"""Of the largest weight of a tensor after the steps."""


def require_divisible(
    prepared: Prepared, make: MakeOptimizer, *, saves: bool, strategy: str | None = None
) -> None:
    """Refuse an optimizer that the ranks of this plan cannot run as one process would.

    Args:
        prepared: of this rank.
        make: makes the optimizer of parameters by name.
        saves: whether its state is going to be saved.
        strategy: of synchronisation, over the plan's.

    Raises:
        PipeplanError: naming the optimizer, what it depends on, and the remedies.
    """
    plan, strategy = prepared.plan, strategy or prepared.plan.sync.strategy
    own = {name: p for name, p in prepared.parameters.items() if p.requires_grad}
    trial = _Trial(make, prepared.device)
    with _nothing_noticed(trial):
        shapes = {name: _small(p.shape) for name, p in own.items()}
        large = next((n for n, p in own.items() if p.ndim == 2 and p.numel() >= _LARGE), None)
        if large is not None:
            shapes[large] = list(_SHARED_SIZE)
        small = trial.weights(shapes)
        trainable = {p.name for p in plan.model.graph.parameters if p.trainable}
        if strategy in SERVED or not trainable <= own.keys():
            trial.require_by_tensor(small)
        if strategy in STEP_BY_PART:
            trial.require_in_turns(small, strategy)
        place = plan.place_of(prepared.place.rank)
        shares = member_shares(planned_split(plan, place.members), place.member)
        dimensions = {name: shares[name].dimension for name in own if name in shares}
        if dimensions:
            sizes = {n: _shared(own[n].shape, dimension) for n, dimension in dimensions.items()}
            trial.require_by_element(trial.weights(sizes), dimensions)
        if saves:
            trial.require_resumable(small)


def _small(shape: Sequence[int]) -> list[int]:
    most = _SIZE if len(shape) <= 2 else _OTHERS
    return [min(size, most) for size in shape]


def _shared(shape: Sequence[int], dimension: int) -> list[int]:
    """A size at which optimizers that treat blocks of elements do so, for the whole alone."""
    whole, other = _SHARED_SIZE if len(shape) <= 2 else (_SHARED_SIZE[0], _OTHERS)
    return [whole if place == dimension else other for place in range(len(shape))]


@contextmanager
def _nothing_noticed(trial: _Trial) -> Iterator[None]:
    """Leave generators and counters of classes as they were, and print nothing."""
    try:
        with own_draws(), redirect_stdout(io.StringIO()):
            yield
    finally:
        for kind, values in trial.classes.items():
            for name, value in values.items():
                setattr(kind, name, value)


class _Trial:
    """Runs an optimizer on synthetic parameters.

    Attributes:
        classes: plain numbers that the optimizer's own classes held before the first step.
    """

    def __init__(self, make: MakeOptimizer, device: torch.device) -> None:
        self._make = make
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        self.name = ""
        self.classes: dict[type, dict[str, Any]] = {}

    def weights(self, shapes: Mapping[str, Sequence[int]]) -> Weights:
        """Return parameters of these shapes; a lone one gets another beside it."""
        if len(shapes) == 1:
            shapes = {**shapes, **{f"{name}_beside": shape for name, shape in shapes.items()}}
        return {name: self._draw(shape) * _WEIGHTS for name, shape in shapes.items()}

    def _draw(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device)

    def _optimizer(self, weights: Weights) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]:
        parameters = {name: nn.Parameter(x.clone()) for name, x in weights.items()}
        made = self._make(parameters)
        self.name = optimizer_name(made)
        for kind in type(made).__mro__:
            if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                numbers = {k: v for k, v in vars(kind).items() if isinstance(v, int | float)}
                self.classes.setdefault(kind, numbers)
        return made, parameters

    def _gradients(self, weights: Weights) -> list[Weights]:
        """Return gradients of a main direction and some noise, step by step."""
        main = {name: self._draw(x.shape) for name, x in weights.items()}
        return [
            {name: scale * (x + 0.1 * self._draw(x.shape)) for name, x in main.items()}
            for scale in _SCALES
        ]

    def _run(
        self, weights: Weights, gradients: Sequence[Weights], turns: Sequence[Sequence[str]] = ()
    ) -> Weights:
        """Return weights after steps on all of them, or on some after the other in each."""
        optimizer, parameters = self._optimizer(weights)
        for row in gradients:
            for names in turns or [list(weights)]:
                _step(optimizer, parameters, {name: row[name] for name in names})
        return {name: p.detach() for name, p in parameters.items()}

    def require_by_tensor(self, weights: Weights) -> None:
        """Refuse a step on a tensor that depends on other tensors."""
        gradients = self._gradients(weights)
        names = list(weights)
        parts = [names[::2], names[1::2]]
        found: Weights = {}
        for part in parts:
            rows = [{name: row[name] for name in part} for row in gradients]
            found.update(self._run({name: weights[name] for name in part}, rows))
        if _differ(found, self._run(weights, gradients)):
            raise PipeplanError(
                f"optimizer {self.name}: its step on a parameter depends on all parameters (by a "
                "norm or a step size over all of them, or a count of calls), and a rank of this "
                "plan has some of them; let the training file's clip_norm clip and the learning "
                "rate be given, or plan with all layers on one stage and shard_optimizer = false"
            )

    def require_in_turns(self, weights: Weights, strategy: str) -> None:
        """Refuse an optimizer that cannot step on some parameters after the other."""
        gradients, names = self._gradients(weights), list(weights)
        in_turns = self._run(weights, gradients, [names[::2], names[1::2]])
        if _differ(in_turns, self._run(weights, gradients)):
            raise PipeplanError(
                f"optimizer {self.name}: it counts or measures its calls over all parameters, and "
                f"sync.strategy {strategy!r} calls it for some parameters after the other; use "
                "--sync all_reduce"
            )

    def require_by_element(self, weights: Weights, dimensions: Mapping[str, int]) -> None:
        """Refuse a step on a part of a tensor that is no part of the step on all of it."""
        gradients = self._gradients(weights)
        whole = self._run(weights, gradients)
        for part in range(2):

            def half(name: str, x: Tensor, part: int = part) -> Tensor:
                dimension = dimensions.get(name.removesuffix("_beside"), 0)
                return x.chunk(2, dimension)[part].contiguous()

            rows = [{name: half(name, x) for name, x in row.items()} for row in gradients]
            found = self._run({name: half(name, x) for name, x in weights.items()}, rows)
            if _differ(found, {name: half(name, x) for name, x in whole.items()}):
                raise PipeplanError(
                    f"optimizer {self.name} steps by whole parameters, of which a rank of a "
                    "tensor-parallel group has shares; use one that treats each element by "
                    "itself, such as AdamW or SGD, or plan without tensor parallelism"
                )

    def require_resumable(self, weights: Weights) -> None:
        """Refuse an optimizer that a checkpoint does not hold all of."""
        gradients, middle = self._gradients(weights), len(_SCALES) // 2
        optimizer, parameters = self._optimizer(weights)
        first = groups_of(optimizer)
        for row in gradients[:middle]:
            _step(optimizer, parameters, row)
        state = {k: v.clone() for k, v in export_state(optimizer, parameters, first).items()}
        again, resumed = self._optimizer({name: p.detach() for name, p in parameters.items()})
        import_state(again, resumed, state)
        for row in gradients[middle:]:
            _step(optimizer, parameters, row)
            _step(again, resumed, row)
        if any(not torch.equal(parameters[name], resumed[name]) for name in parameters):
            raise PipeplanError(
                f"optimizer {self.name} keeps numbers outside of its state and param_groups, which "
                "no checkpoint holds: a resumed training would be another; keep them in one of "
                "the two, or train without [checkpoint]"
            )


def _step(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], gradients: Weights
) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone() if name in gradients else None
    step: Callable[[], object] = optimizer.step
    try:
        step()
    except FAILURES as error:
        raise PipeplanError(
            f"optimizer {optimizer_name(optimizer)} failed when it was tried on small parameters "
            f"of the model's names: {one_line(error)}"
        ) from error


def _differ(found: Weights, expected: Weights) -> bool:
    return any(
        x.numel() and bool((x - expected[name]).abs().max() > _TOLERANCE * x.abs().max())
        for name, x in found.items()
    )
