"""The pieces together: training that resumes among other ranks goes on as if nothing had been."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from thread_ranks import together
from torch import Tensor, nn

from executor.checkpoint import Checkpoint, Ranks, save_checkpoint
from executor.training.dataset import DatasetBatches
from executor.training.loss_scale import LossScale, LossScalePolicy
from executor.training.master_weights import (
    HeldParameter,
    MasterWeights,
    clip_factor,
    gradient_norm,
    scale_gradients,
)
from executor.training.optimisation import known_schedule, set_learning_rate
from executor.training.optimizer import export_state, import_state, job_optimizer
from planner.job import Job

STEPS = 9
JOB = Job(learning_rate=0.02)
ROWS = [
    (torch.randn(6, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 3))
    for i in range(31)
]


class Run:
    """A model whose parameters are divided among ranks, in one process."""

    def __init__(self, dtype: torch.dtype, cuts: Sequence[int]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
        self.model[2:].to(dtype)
        names = list(self.model.named_parameters())
        parts = [dict(names[a:b]) for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        self.ranks = [MasterWeights(part, lambda held: job_optimizer(JOB, held)) for part in parts]
        self.scale = LossScale.start(LossScalePolicy(initial=2.0**19, growth_interval=3))
        self.schedule = known_schedule("cosine", STEPS, warmup_steps=3, final_factor=0.1)
        self.seen, self.first_step = 0, 1
        self.overflows = 0

    def train(self, last: int, samples: int, microbatches: int) -> list[float]:
        example = {"x": torch.zeros(samples, 6), "target": torch.zeros(samples).long()}
        batches = DatasetBatches(
            ROWS, example, microbatches, 5, samples_seen=self.seen, first_step=self.first_step
        )
        losses = [
            self._step(step, batches, microbatches) for step in range(self.first_step, last + 1)
        ]
        self.seen, self.first_step = batches.samples_seen_after(last), last + 1
        return losses

    def _step(self, step: int, batches: DatasetBatches, microbatches: int) -> float:
        whole = [batches(step, microbatch) for microbatch in range(microbatches)]
        # One forward, so that the sums are the same however the step is divided.
        loss = self._loss({name: torch.cat([b[name] for b in whole]) for name in whole[0]})
        (loss * self.scale.scale).backward()
        for rank in self.ranks:
            rank.unscale(self.scale.scale)
        held = [HeldParameter(m, counted=True) for r in self.ranks for m in r.masters.values()]
        norm = gradient_norm(held, lambda total: total)
        finite = math.isfinite(norm)
        self.overflows += not finite
        scale_gradients(held, clip_factor(norm, 0.5) if finite else 1.0)
        for rank in self.ranks:
            set_learning_rate(rank.optimizer, self.schedule(step))
            rank.step() if finite else rank.skip()
        self.scale = self.scale.after(overflowed=not finite)
        return loss.item()

    def _loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        hidden = self.model[1](self.model[0](batch["x"]))
        output = self.model[2:](hidden.to(self.model[2].weight.dtype))
        return nn.functional.cross_entropy(output.float(), batch["target"])

    def save(self, folder: Path) -> None:
        def save_part(ranks: Ranks) -> Path:
            weights = self.ranks[ranks.rank]
            moments = export_state(weights.optimizer, weights.masters)
            tensors = {
                **{f"parameters/{name}": p for name, p in weights.parameters.items()},
                **{f"master/{name}": master for name, master in weights.state().items()},
                **{f"optimizer/{name}": tensor for name, tensor in moments.items()},
            }
            facts = {"samples_seen": self.seen, "loss_scale": self.scale.facts()}
            return save_checkpoint(folder, self.first_step - 1, tensors, facts, ranks=ranks)

        together(len(self.ranks), save_part)

    def resume(self, folder: Path) -> None:
        checkpoint = Checkpoint.open(folder)
        for weights in self.ranks:
            held = weights.parameters
            checkpoint.read_into({f"parameters/{name}": p for name, p in held.items()})
            masters = checkpoint.read([f"master/{name}" for name in weights.state()])
            weights.load({name.removeprefix("master/"): x for name, x in masters.items()})
            names = [n for name in held for n in checkpoint.names(f"optimizer/{name}/")]
            moments = checkpoint.read(names)
            state = {name.removeprefix("optimizer/"): x for name, x in moments.items()}
            import_state(weights.optimizer, weights.masters, state)
        self.scale = LossScale.from_facts(checkpoint.facts["loss_scale"])
        self.seen, self.first_step = checkpoint.facts["samples_seen"], checkpoint.step + 1


@pytest.mark.extensive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stop", [1, 4])
def test_training_goes_on_bit_by_bit_among_other_ranks(
    tmp_path: Path, dtype: torch.dtype, stop: int
) -> None:
    whole = Run(dtype, [])
    expected = whole.train(STEPS, samples=2, microbatches=6)
    assert expected[-1] < expected[0]
    assert (whole.overflows > 0) == (dtype == torch.float16)
    first = Run(dtype, [1, 4])
    losses = first.train(stop, samples=2, microbatches=6)
    first.save(tmp_path)
    second = Run(dtype, [3])
    second.resume(tmp_path)
    losses += second.train(STEPS, samples=4, microbatches=3)
    assert losses == expected
    for name, parameter in whole.model.named_parameters():
        assert second.model.get_parameter(name).equal(parameter), name
