"""Trainings of a model by plans on two ranks, in one launch, compared with plain torch."""

import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

from executor_plans import pipeline_of, scheduled, shuffled
from launch import environment, torchrun
from plain_torch import Alone, worst_error
from run_files import RunFiles

from executor.launch.check import compare_stages
from executor.launch.model import Factory
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.tracing.check import compare_with_eager
from planner.tracing.trace import trace_step

HERE = Path(__file__).parent
STEPS, RANKS, MICROBATCHES = 3, 2, 4
Case = tuple[str, str]
"""A model, and "chain" (two stages) or "mixed" (replicas, recomputation, split backwards)."""


def plan_of(name: str, kind: str) -> Plan:
    """Return a plan of a model, ``module:factory``.

    Raises:
        PipeplanError: if the trace, the comparison or the plan refuses it.
    """
    made = _made(name)
    loss = getattr(made, "loss", "cross_entropy")
    job = Job(samples_per_microbatch=2, loss=loss)
    step = trace_step(made, job)
    compare_with_eager(made, job, step.graph)
    graph = LayerGraph.from_record(step.graph)
    layers = list(graph.layers)
    half, fields = len(layers) // 2, {"microbatches": MICROBATCHES, "loss": loss}
    if kind == "chain" and half:
        parts = [(layers[:half], ["d0"]), (layers[half:], ["d1"])]
        return scheduled(pipeline_of(graph, name, parts, **fields))
    parts = [(layers[:half], ["d0", "d1"]), (layers[half:], ["d1"] if half else ["d0", "d1"])]
    stages = [(part, on, part[::2]) for part, on in parts if part]
    return shuffled(pipeline_of(graph, name, stages, **fields), 7, split=0.5)


def _made(name: str) -> Factory:
    module, _, factory = name.partition(":")
    return getattr(import_module(module), factory)  # type: ignore[no-any-return]


class Trainings:
    """Trains each case that nothing refuses before.

    Attributes:
        refusals: what refused a case before its first step, by case.
    """

    def __init__(self, folder: Path, cases: Iterable[Case]) -> None:
        self.files = RunFiles(folder, STEPS)
        self.refusals: dict[Case, str] = {}
        for case in cases:
            try:
                plan = plan_of(*case)
                compare_stages(plan, _made(case[0]), None)  # As the first rank does.
            except PipeplanError as error:
                self.refusals[case] = str(error)
            else:
                self.files.add(_key(case), plan, model=case[0], timeout_s=60.0)
        worker = str(HERE / "fidelity_worker.py")
        folders = environment(HERE, HERE.parent / "executor", HERE.parent)
        done = torchrun(RANKS, worker, str(folder), env=folders)
        assert done.returncode == 0, done.stderr[-4000:]

    def outcome(self, case: Case) -> str:
        """Return why a case was refused, or ``error ...``, the error of losses and state."""
        if case in self.refusals:
            return self.refusals[case]
        results = [self._result(case, rank) for rank in range(RANKS)]
        told = [result for result in results if isinstance(result, str)]
        if told:
            return told[0]
        files, key = self.files, _key(case)
        alone = Alone(Plan.load(files.folder / f"{key}.json"), files.config(key))
        losses = alone.train(STEPS)
        pairs = zip(results[0], losses, strict=True)
        worst = max(abs(row["loss"] - loss) / abs(loss) for row, loss in pairs)
        state = alone.model.state_dict()
        buffers = {n: x for n, x in alone.model.named_buffers() if n in state}
        # Checkpoints have the names of the model that was compiled.
        named = (alone.parameters() | buffers).items()
        expected = {n.replace("_orig_mod.", ""): x for n, x in named}
        found = files.state(key)
        # The exact gradient of these is zero: a ratio would compare one rounding with another.
        for name in getattr(alone.model, "without_effect", ()):
            worst = max(worst, float(found.pop(name).norm()), float(expected.pop(name).norm()))
        return f"error {max(worst, worst_error(found, expected)):.1e}"

    def _result(self, case: Case, rank: int) -> list[Mapping[str, float]] | str:
        return json.loads((self.files.folder / f"{_key(case)}.{rank}").read_text())


def _key(case: Case) -> str:
    name, kind = case
    return f"{name.partition(':')[2]}.{kind}"
