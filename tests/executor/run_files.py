"""Many trainings in one launch: their files in a folder, and what they leave there."""

import json
from pathlib import Path

from launch import environment, forked
from plain_torch import Named

from executor.checkpoint import Checkpoint
from executor.launch.config import TrainingConfig
from planner.plan.plan import Plan

HERE = Path(__file__).parent


def training_file(folder: Path, steps: int, every: int | None = None) -> str:
    """Return a training file with a schedule and checkpoints, by default one at the end."""
    rows = {"steps": steps, "seed": 5, "data": "random", "learning_rate": 0.01}
    lines = [f"{name} = {json.dumps(value)}" for name, value in rows.items()]
    tables = '[schedule]\nkind = "cosine"\nwarmup_steps = 2\n'
    tables += f'[checkpoint]\nfolder = "{folder}"\nevery = {every or steps}'
    return "\n".join(['format = "pipeplan-train/1"', *lines, tables, ""])


class RunFiles:
    """Trainings by name, run in the order of their names, each with a checkpoint at its end."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps

    def add(
        self,
        name: str,
        plan: Plan,
        text: str = "",
        every: int = 99,
        steps: int | None = None,
        data: str = "random",
        **run: object,
    ) -> None:
        plan.save(self.folder / f"{name}.json")
        head = f'format = "pipeplan-train/1"\nsteps = {steps or self.steps}\nseed = 3\n'
        head += f'data = "{data}"\n'
        table = f'[checkpoint]\nfolder = "{self.checkpoints(name)}"\nevery = {every}\n'
        (self.folder / f"{name}.toml").write_text(f"{head}{text}\n{table}")
        (self.folder / f"{name}.run").write_text(json.dumps(run))

    def launch(self, ranks: int, *folders: Path) -> None:
        worker = str(HERE / "runs_worker.py")
        done = forked(ranks, worker, str(self.folder), env=environment(HERE, *folders))
        assert done.returncode == 0, done.stderr[-4000:]

    def checkpoints(self, name: str) -> Path:
        return self.folder / "checkpoints" / name

    def history(self, name: str) -> list[dict]:
        found = json.loads((self.folder / f"{name}.history").read_text())
        assert isinstance(found, list), found
        return found

    def losses(self, name: str) -> list[float]:
        return [metrics["loss"] for metrics in self.history(name)]

    def config(self, name: str) -> TrainingConfig:
        return TrainingConfig.load(self.folder / f"{name}.toml")

    def parameters(self, name: str) -> Named:
        return self._read(name, "parameters/")

    def state(self, name: str) -> Named:
        """Return parameters and buffers."""
        return self._read(name, "parameters/") | self._read(name, "buffers/")

    def _read(self, name: str, kind: str) -> Named:
        checkpoint = Checkpoint.open(self.checkpoints(name))
        read = checkpoint.read(checkpoint.names(kind))
        return {n.removeprefix(kind): x for n, x in read.items()}
