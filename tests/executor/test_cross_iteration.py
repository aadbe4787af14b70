"""Cross-iteration against the rule, written down for one process; and what it refuses."""

import copy
import json
import math

import pytest
import torch
from executor_plans import by_counts, pipeline_of, shuffled, traced
from plain_torch import Alone, Named, worst_error
from run_files import RunFiles
from torch import Tensor, nn

from executor.sync import require_strategy
from models import ZOO
from planner.errors import PipeplanError
from planner.plan.operations import owners
from planner.plan.plan import Plan, Sync

pytestmark = pytest.mark.extensive
STEPS, LONG, CLIP = 5, 40, 0.3
CLIPPED = f"clip_norm = {CLIP}\n[schedule]\nkind = 'linear'\nwarmup_steps = 2\n"
APPROXIMATIONS = ("own_gradient", "last_update")


def uneven(precision: str = "float64", **job: object) -> Plan:
    """A stage of two replicas with one and three microbatches, and one that nobody shares."""
    graph = traced("llama_tiny", precision)
    layers = list(graph.layers)
    rows = [(layers[:3], ["d0", "d1"]), (layers[3:], ["d2"])]
    pipeline = pipeline_of(
        graph, ZOO["llama_tiny"], rows, microbatches=4, precision=precision, **job
    )
    owner = {**by_counts(0, {"d0": 1, "d1": 3}), **{(1, m): "d2" for m in range(4)}}
    return shuffled(pipeline, 3, owner)


PLANS = {
    "momentum": {"learning_rate": 0.05},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.003},
}


class Rule:
    """The rule: true weights, and an approximation of them on every device."""

    def __init__(self, alone: Alone, approximation: str) -> None:
        self.alone, self.plan = alone, alone.plan
        self.repeats = approximation == "last_update"
        used = {layer.name: layer.parameters for layer in self.plan.model.graph.layers}
        self.stage_of = {
            name: stage.index
            for stage in self.plan.stages
            for layer in stage.layers
            for name in used[layer]
        }
        self.devices = {n: self.plan.stages[s].devices for n, s in self.stage_of.items()}
        self.owner = owners(self.plan.parsed_orders())
        self.true = alone.masters
        self.optimizer = alone.optimizer
        self.on = {d: self._values(self.true) for d in self.plan.ranks}
        self.model = copy.deepcopy(alone.model)
        alone.step_of.model = self.model
        self.last: Named = {}

    @staticmethod
    def _values(parameters: dict[str, nn.Parameter]) -> Named:
        return {name: p.detach().clone() for name, p in parameters.items()}

    def step(self, step: int) -> float:
        loss, found = 0.0, {d: {} for d in self.plan.ranks}
        for m in range(self.plan.microbatches):
            loss += self._microbatch(step, m, found)
        if self.last:
            self.advance(step - 1)
        before = self.previous if self.last else self._values(self.true)
        self.last = {n: sum(f[n] for f in found.values() if n in f) for n in self.true}
        estimates = {d: self._estimates(d, f) for d, f in found.items()}
        counted = [
            estimates[devices[0]][n]
            for n, devices in self.devices.items()
            if not (self.repeats and len(devices) > 1)
        ]
        norm = math.sqrt(sum(float(g.square().sum()) for g in counted))
        factor = min(1.0, CLIP / (norm + 1e-6))
        for device, own in estimates.items():
            true, optimizer = copy.deepcopy((self.true, self.optimizer))
            self._apply(step, true, optimizer, {n: g * factor for n, g in own.items()})
            self.on[device] = self._values(true)
            for name in self.true if self.repeats else ():
                if len(self.devices[name]) > 1:
                    self.on[device][name] = 2 * self.true[name].detach() - before[name]
        return loss / self.plan.microbatches

    def _microbatch(self, step: int, m: int, found: dict[str, Named]) -> float:
        where = {n: self.owner[s, m] for n, s in self.stage_of.items()}
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.on[where[name]][name])
        loss = self.alone._microbatch(step, m)
        for name, p in self.model.named_parameters():
            own = found[where[name]]
            own[name] = own.get(name, 0) + p.grad
        return loss

    def _estimates(self, device: str, own: Named) -> Named:
        """Over the share of the microbatches that the device has run."""
        count = self.plan.microbatches
        run = {s: sum(self.owner[s, m] == device for m in range(count)) for s in (0, 1)}
        return {n: g * count / run[self.stage_of[n]] for n, g in own.items()}

    def advance(self, step: int) -> None:
        """The true step, by all gradients."""
        self.previous = self._values(self.true)
        norm = math.sqrt(sum(float(g.square().sum()) for g in self.last.values()))
        factor = min(1.0, CLIP / (norm + 1e-6))
        gradients = {n: g * factor for n, g in self.last.items()}
        self._apply(step, self.true, self.optimizer, gradients)

    def _apply(
        self, step: int, parameters: dict[str, nn.Parameter], optimizer, gradients: Named
    ) -> None:
        for name, p in parameters.items():
            gradient: Tensor | None = gradients.get(name)
            p.grad = gradient
        for group, rate in zip(optimizer.param_groups, self.alone.rates, strict=True):
            group["lr"] = rate * self.alone.factor(step)
        optimizer.step()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    found = RunFiles(tmp_path_factory.mktemp("runs"), STEPS)
    for name, job in PLANS.items():
        plan = uneven(**job)
        for approximation in APPROXIMATIONS:
            sync = f"cross_iteration:approximation={approximation}"
            found.add(f"{name}.{approximation}", plan, CLIPPED, sync=sync)
    long = uneven("float32", optimizer="adamw", learning_rate=0.003)
    for name, sync in {
        "exact": "all_reduce",
        "own_gradient": "cross_iteration",
        "last_update": "cross_iteration:approximation=last_update",
    }.items():
        found.add(f"long.{name}", long, steps=LONG, data="text", sync=sync)
    found.launch(3)
    return found


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("name", PLANS)
def test_it_follows_the_rule(runs: RunFiles, name: str, approximation: str) -> None:
    run = f"{name}.{approximation}"
    rule = Rule(Alone(uneven(**PLANS[name]), runs.config(run)), approximation)
    losses = [rule.step(step) for step in range(1, STEPS + 1)]
    rule.advance(STEPS)
    assert runs.losses(run) == pytest.approx(losses, rel=1e-10)
    assert worst_error(runs.parameters(run), rule._values(rule.true)) < 1e-9


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_it_learns_as_well_as_all_reduce(runs: RunFiles, approximation: str) -> None:
    exact, found = runs.losses("long.exact"), runs.losses(f"long.{approximation}")
    assert found[0] == pytest.approx(exact[0], rel=1e-6)
    assert exact[-1] < 0.8 * exact[0]
    assert sum(found[-5:]) == pytest.approx(sum(exact[-5:]), rel=0.01)


def test_float16_is_refused() -> None:
    data = json.loads(uneven("float16").model_dump_json())
    plan = Plan.parse(data).model_copy(update={"sync": Sync(strategy="cross_iteration")})
    with pytest.raises(PipeplanError, match=r"sync\.strategy: cross_iteration .* --sync all_redu"):
        require_strategy(plan)
