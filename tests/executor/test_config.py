"""The training file: read whole, all errors at once, and its optimizer and schedule made."""

from pathlib import Path

import pytest
import torch
from torch import nn

from executor.launch.command_line import config_of, parser
from executor.launch.config import TrainingConfig
from executor.training.optimizer import job_optimizer, own_optimizer
from planner.errors import PipeplanError
from planner.job import Job

ROOT = Path(__file__).parents[2]
HEAD = 'format = "pipeplan-train/1"\n'


def load(tmp_path: Path, text: str) -> TrainingConfig:
    (tmp_path / "train.toml").write_text(text)
    return TrainingConfig.load(tmp_path / "train.toml")


def held() -> dict[str, nn.Parameter]:
    return {"a.weight": nn.Parameter(torch.ones(2)), "a.bias": nn.Parameter(torch.ones(1))}


def test_the_example_is_a_training_file() -> None:
    config = TrainingConfig.load(ROOT / "examples" / "train" / "demo.toml")
    assert (config.steps, config.clip_norm, config.checkpoint.keep) == (20, 1.0, 2)
    factor = config.rate_factor()
    assert [factor(1), factor(4), factor(20)] == pytest.approx([0.25, 1.0, 0.1])
    job = Job.load(ROOT / "examples" / "jobs" / "demo.toml")
    made = job_optimizer(job, held(), config.optimizer_arguments, config.learning_rate)
    assert isinstance(made, torch.optim.AdamW)
    assert made.defaults["betas"] == (0.9, 0.95)
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (3e-4, 0.1)


def test_an_empty_file_trains_as_the_job_says(tmp_path: Path) -> None:
    config = load(tmp_path, HEAD)
    assert config == TrainingConfig()
    assert [config.rate_factor()(step) for step in (1, 20, 21)] == [1.0, 1.0, 1.0]


def test_options_over_a_file_leave_its_defaults_unset(tmp_path: Path) -> None:
    """A schedule of one's own goes without the fields of the others, which have defaults."""
    path = tmp_path / "train.toml"
    path.write_text(HEAD + 'steps = 5\n[schedule]\nkind = "user_code:halved"\n')
    words = ["plan.json", "--config", str(path), "--seed", "3"]
    config = config_of(parser().parse_args(words))
    assert (config.steps, config.seed, config.schedule.kind) == (5, 3, "user_code:halved")


def test_all_errors_are_told_at_once(tmp_path: Path) -> None:
    text = """
steps = 0
data = "texts"
optimizer = "adamw"
clip_norm = nan
autocast = "float16"
lerning_rate = 3
[schedule]
kind = "exponential"
final_factor = 2
[loss_scale]
growth_factor = 1
[checkpoint]
keep = 0
"""
    with pytest.raises(PipeplanError) as caught:
        load(tmp_path, HEAD + text)
    found = [line.partition("train.toml: ")[2] for line in caught.value.problems]
    assert sorted(found) == [
        "autocast: expected 'bfloat16' (found 'float16')",
        "checkpoint.every: this field is missing; add it",
        "checkpoint.folder: this field is missing; add it",
        "checkpoint.keep: expected at least 1 (found 0)",
        "clip_norm: expected a finite number (found nan)",
        "data: expected 'text', 'random' or module:name of your own (found 'texts')",
        "lerning_rate: unknown field (value 3); did you mean 'learning_rate'?",
        "loss_scale.growth_factor: expected more than 1.0 (found 1)",
        "optimizer: expected module:name of your own (found 'adamw')",
        "schedule.final_factor: expected at most 1.0 (found 2)",
        "schedule.kind: expected 'constant', 'linear', 'cosine' or module:name of your own "
        "(found 'exponential')",
        "steps: expected at least 1 (found 0)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data_arguments = { size = 3 }", "data_arguments: data = 'text' takes none; remove them"),
        ("optimizer_arguments = { lr = 1.0 }", "arguments.lr: write it as learning_rate instead"),
        ("[schedule]\nwarmup_steps = 21", "schedule.warmup_steps: 21 of 20 steps; expected at"),
        (
            '[schedule]\nkind = "a:b"\nwarmup_steps = 2',
            "schedule: warmup_steps beside kind = 'a:b'",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PipeplanError) as caught:
        load(tmp_path, HEAD + text)
    assert message in str(caught.value)


def test_another_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(PipeplanError, match=r"this is a job file, give a training file"):
        load(tmp_path, 'format = "pipeplan-job/1"')
    with pytest.raises(PipeplanError, match=r"the field is missing; is this a training file\?"):
        load(tmp_path, "steps = 3")


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adamw", torch.optim.AdamW, {"lr": 0.5}),
        ("sgd", torch.optim.SGD, {"momentum": 0}),
        ("sgd_momentum", torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_the_jobs_optimizer(name: str, kind: type, options: dict) -> None:
    made = job_optimizer(Job(optimizer=name), held(), learning_rate=0.5)
    assert type(made) is kind
    assert options.items() <= made.defaults.items()
    assert job_optimizer(Job(optimizer=name), {}).param_groups  # A rank without parameters.


def test_arguments_that_torch_refuses_are_told() -> None:
    with pytest.raises(PipeplanError, match=r"optimizer 'adamw' .*\{'beta': 1\}.*AdamW documents"):
        job_optimizer(Job(), held(), {"beta": 1})
    with pytest.raises(PipeplanError, match="Invalid weight_decay value: -1"):
        job_optimizer(Job(), held(), {"weight_decay": -1})


SOURCE = """
import torch

def no_decay(named, lr, decay=0.1):
    named = list(named)
    return torch.optim.SGD([
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named if not n.endswith("bias")]},
    ], lr=lr, weight_decay=decay)

def partial(named):
    return torch.optim.SGD([p for n, p in named if "bias" in n])

def foreign(named):
    return torch.optim.SGD([*(p for _, p in named), torch.nn.Parameter(torch.ones(1))])

def number(named):
    return 3

def fails(named):
    raise ValueError("odd")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "optimizers_for_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return "optimizers_for_a_test"


def test_an_optimizer_of_the_users_own(own: str) -> None:
    parameters = held()
    made = own_optimizer(f"{own}:no_decay", parameters, {"decay": 0.3}, 0.7)
    assert [group["weight_decay"] for group in made.param_groups] == [0.0, 0.3]
    assert made.param_groups[0]["params"] == [parameters["a.bias"]]
    assert made.defaults["lr"] == 0.7
    assert own_optimizer(f"{own}:no_decay", {}, learning_rate=1.0).param_groups


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_decay", r"missing 1 required positional argument: 'lr'"),
        ("partial", r"leaves out a\.weight; put every parameter"),
        ("foreign", r"trains 1 tensors that it was not given"),
        ("number", r"returned int, expected a torch\.optim\.Optimizer"),
        ("fails", r"cannot be made: ValueError: odd \(.*optimizers_for_a_test\.py:21\)"),
        ("none", r"has no callable 'none'"),
    ],
)
def test_what_is_no_optimizer_is_told(own: str, name: str, message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        own_optimizer(f"{own}:{name}", held())
