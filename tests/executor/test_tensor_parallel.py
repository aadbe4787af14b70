"""Tensor-parallel groups: members in threads of one process, and as ranks of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier

import pytest
import torch
from executor_plans import on_groups, scheduled, shuffled
from plain_torch import Alone, worst_error
from run_files import RunFiles
from torch import Tensor

from executor.distributed.member_group import TensorParallelGroup, sum_partial_gradients
from executor.launch.config import TrainingConfig
from executor.launch.prepare import Prepared, prepare
from executor.launch.refusals import require_possible
from executor.launch.run import PlanRank, RunSettings
from executor.stage.runner import StageRunner
from executor.sync.shared_parameters import planned_split
from planner.errors import PipeplanError
from planner.measured.timeline import MeasuredTimeline
from planner.plan.plan import Plan
from planner.tracing.factory import TrainingStep, build, example_batch, import_factory
from planner.tracing.sharding.local import join

pytestmark = pytest.mark.usefixtures("shared_exports")


class Meeting:
    """Members that are threads exchange tensors here."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.rows: list[list[Tensor]] = [[]] * degree
        self.barrier = Barrier(degree, timeout=300)

    def all(self, index: int, value: Tensor) -> Tensor:
        return torch.stack(self.lists(index, [value]))

    def lists(self, index: int, values: Sequence[Tensor]) -> list[Tensor]:
        """What each member has for this one; of a single value, everyone the same."""
        self.rows[index] = [value.clone() for value in values]
        self.barrier.wait()
        found = [row[min(index, len(row) - 1)] for row in self.rows]
        self.barrier.wait()
        return found


class ThreadMembers:
    """The members of a group, as one of their threads sees them."""

    shapes_only = False

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.degree, self.index = meeting.degree, index
        self.all, self.lists = meeting.all, meeting.lists
        self.calls: Counter[str] = Counter()

    def sum(self, value: Tensor) -> None:
        value.copy_(self.all(self.index, value).sum(0))

    def highest(self, value: Tensor) -> None:
        value.copy_(self.all(self.index, value).amax(0))

    def gather(self, value: Tensor) -> Tensor:
        self.calls["all_gather"] += 1
        return self.all(self.index, value)

    def reduce_scatter(self, values: Tensor) -> Tensor:
        self.calls["reduce_scatter"] += 1
        return self.all(self.index, values).sum(0)[self.index]

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.calls["all_to_all"] += 1
        found = self.lists(self.index, rows.split([*sent]))
        assert [len(part) for part in found] == [*received]
        return torch.cat(found)


Gradients = dict[str, Tensor]


def run_member(
    ranks: Sequence[Prepared], members: ThreadMembers, batch: dict[str, Tensor], *, split: bool
) -> tuple[Tensor, list[Gradients]]:
    """One microbatch through the stages of ranks that have one place in their groups."""
    group = TensorParallelGroup(members)
    runners = [
        StageRunner(stage, 1, (0,) if split else (), group=group)
        for rank in ranks
        for stage in rank.stages
    ]
    made: tuple[Tensor, ...] = ()
    for runner in runners:
        made = runner.forward(0, made, batch)
    gradients: tuple[Tensor, ...] = ()
    for runner in reversed(runners):
        gradients = runner.backward(0, gradients)
    for runner in runners if split else ():
        runner.weight_gradients(0)
    planned = planned_split(ranks[0].plan, members.degree)
    assert planned is not None
    for rank in ranks:
        summed = [p for name, p in rank.parameters.items() if name in planned.summed_parameters]
        sum_partial_gradients(members, summed)
    return made[0], [{n: p.grad for n, p in rank.parameters.items()} for rank in ranks]


def whole_gradients(plan: Plan, found: Sequence[list[Gradients]]) -> Gradients:
    """Shares joined and, of a tied parameter, the gradients of its stages added up."""
    split, total = planned_split(plan, plan.degree), {}
    assert split is not None
    for place in range(len(plan.ranks)):
        for name, gradient in found[0][place].items():
            of_members = [rows[place][name] for rows in found]
            if name in split.parameters:
                row = split.parameters[name]
                gradient = join(of_members, row.dimension, row.parts)
            else:
                assert all(torch.equal(gradient, other) for other in of_members), name
            total[name] = total[name] + gradient if name in total else gradient
    return total


@cache
def four_heads() -> Plan:
    arguments = {"kv_heads": 4, "layers": 2}
    return on_groups(
        "llama_tiny", [], ["g0"], scheduled, 4, precision="float64", model_arguments=arguments
    )


@cache
def recomputed() -> Plan:
    return on_groups(
        "gpt_tiny", [4], ["g0", "g1"], scheduled, recompute=[2, 5], precision="float64"
    )


@cache
def positions_and_tied_ends() -> Plan:
    return on_groups("gpt_tiny", [4], ["g0", "g1"], scheduled, sequence=True, precision="float64")


@cache
def whole_experts() -> Plan:
    return on_groups(
        "mixtral_tiny", [], ["g0"], scheduled, precision="float64", expert_parallel=True
    )


@cache
def whole_experts_and_positions() -> Plan:
    arguments = {"kv_heads": 4, "experts": 8}
    return on_groups(
        "mixtral_tiny",
        [],
        ["g0"],
        scheduled,
        4,
        sequence=True,
        precision="float64",
        expert_parallel=True,
        model_arguments=arguments,
    )


@pytest.mark.parametrize(
    ("make", "split"),
    [
        (four_heads, False),
        (whole_experts, False),
        (whole_experts_and_positions, True),
        (recomputed, False),
        (positions_and_tied_ends, True),
    ],
)
def test_members_compute_the_loss_and_gradients_of_one_process(
    make: Callable[[], Plan], split: bool
) -> None:
    plan = make()
    meeting = Meeting(plan.degree)
    ranks = [prepare(plan, place=PlanRank(k, plan.world_size)) for k in range(plan.world_size)]
    torch.manual_seed(0)
    assert plan.model.factory is not None
    alone = build(import_factory(plan.model.factory), plan.model.arguments).double().train()
    batch = dict(example_batch(alone, plan.job))
    loss = TrainingStep(alone, plan.job.loss)(**batch)
    loss.backward()

    members = [ThreadMembers(meeting, index) for index in range(plan.degree)]

    def member(index: int) -> tuple[Tensor, list[Gradients]]:
        mine = ranks[index :: plan.degree]
        return run_member(mine, members[index], batch, split=split)

    with ThreadPoolExecutor(plan.degree) as pool:
        losses, found = zip(*pool.map(member, range(plan.degree)), strict=True)
    for other in losses:
        torch.testing.assert_close(other, loss.detach(), rtol=1e-12, atol=0)
    gradients = whole_gradients(plan, found)
    assert gradients.keys() == dict(alone.named_parameters()).keys()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-13)
    for kind, count in planned_calls(plan, split=split).items():
        assert members[0].calls[kind] == count


def planned_calls(plan: Plan, *, split: bool) -> Counter[str]:
    """What the plan counts on; a split backward keeps what it does not gather again."""
    record = planned_split(plan, plan.degree)
    assert record is not None
    rows = [row for layer in record.layers for row in layer.collectives]
    kinds = Counter(row.kind for row in rows if not (split and row.phase == "weight_gradient"))
    return Counter({kind: kinds[kind] for kind in ("all_gather", "reduce_scatter", "all_to_all")})


def test_a_rank_holds_shares_of_what_is_split_and_all_of_the_rest() -> None:
    plan = positions_and_tied_ends()
    (shapes,) = {
        tuple(
            (n, tuple(p.shape)) for n, p in prepare(plan, place=PlanRank(k, 4)).parameters.items()
        )
        for k in (0, 1)
    }
    held = dict(shapes)
    assert held["h.0.attn.c_attn.weight"] == (96, 64)
    assert held["h.0.attn.c_proj.weight"] == (64, 32)
    assert held["wte.weight"] == (128, 64)
    assert held["h.0.ln_1.weight"] == (64,)


@cache
def trained_by_two() -> Plan:
    return on_groups(
        "gpt_tiny",
        [],
        ["g0"],
        lambda pipeline: shuffled(pipeline, 1, split=0.5),
        precision="float64",
        optimizer="adamw",
        microbatches=3,
    )


@cache
def experts_of_two() -> Plan:
    return on_groups(
        "mixtral_tiny",
        [],
        ["g0"],
        lambda pipeline: shuffled(pipeline, 1, split=0.5),
        sequence=True,
        microbatches=3,
        expert_parallel=True,
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    """Trainings of two ranks that are one group."""
    runs = RunFiles(tmp_path_factory.mktemp("pair"), steps=2)
    timeline = f'timeline = "{runs.folder / "timeline.json"}"'
    runs.add("two", trained_by_two(), f"clip_norm = 0.5\n{timeline}")
    runs.add("experts", experts_of_two(), "clip_norm = 0.5")
    runs.launch(2)
    return runs


@pytest.mark.parametrize(
    ("name", "make", "within"), [("two", trained_by_two, 1e-12), ("experts", experts_of_two, 1e-6)]
)
def test_ranks_of_a_group_train_and_save_as_one_device(
    pair: RunFiles, name: str, make: Callable[[], Plan], within: float
) -> None:
    alone = Alone(make(), pair.config(name))
    assert pair.losses(name) == pytest.approx(alone.train(2), rel=within)
    assert worst_error(pair.parameters(name), alone.parameters()) < within


def test_a_checkpoint_has_whole_experts(pair: RunFiles) -> None:
    found = pair.parameters("experts")
    assert found["layers.0.block_sparse_moe.experts.up_proj"].shape == (4, 48, 32)


def test_ranks_of_a_group_tell_times_as_one_device(pair: RunFiles) -> None:
    plan, timeline = trained_by_two(), MeasuredTimeline.load(pair.folder / "timeline.json")
    assert [(row.name, row.rank) for row in timeline.devices] == [("g0", 0)]
    assert len(timeline.operations) == 2 * sum(map(len, plan.parsed_orders().values()))
    for event in timeline.operations:
        assert event.collective_s is not None
        assert event.collective_s < event.seconds
        assert (event.collective_s > 0) == (event.what.kind != "W")


@pytest.mark.extensive
def test_a_checkpoint_is_resumed_under_other_degrees(pair: RunFiles, tmp_path: Path) -> None:
    resumed = RunFiles(tmp_path, steps=4)
    fields = {"precision": "float64", "optimizer": "adamw", "microbatches": 3}
    four = on_groups("gpt_tiny", [], ["g0"], scheduled, 4, **fields)
    stages = on_groups("gpt_tiny", [5], ["g0", "g1"], scheduled, sequence=True, **fields)
    checkpoint = str(pair.checkpoints("two"))
    for name, other in (("four", four), ("stages", stages)):
        resumed.add(name, other, "clip_norm = 0.5", resume=checkpoint)
    resumed.launch(4)
    alone = Alone(trained_by_two(), pair.config("two"))
    losses = alone.train(4)
    for name in ("four", "stages"):
        assert resumed.losses(name) == pytest.approx(losses[2:], rel=1e-12)
        assert worst_error(resumed.parameters(name), alone.parameters()) < 1e-11


def with_two_sizes(sizes: Sequence[int], **job: object) -> Plan:
    """Stages of LLaMA on groups of several sizes, the first twice where there are three."""
    cuts, words = {2: ([4], ["g0", "g1"]), 3: ([3, 5], ["g0 g1", "g2", "g0"])}[len(sizes)]
    return on_groups(
        "llama_tiny",
        cuts,
        words,
        lambda pipeline: shuffled(pipeline, 3, split=0.5),
        sizes,
        recompute=[2],
        precision="float64",
        optimizer="adamw",
        microbatches=4,
        model_arguments={"kv_heads": 4},
        **job,
    )


def test_stages_on_groups_of_several_sizes_train_as_one_process(tmp_path: Path) -> None:
    runs = RunFiles(tmp_path, steps=2)
    plan = with_two_sizes((2, 1))
    runs.add("narrower", plan, f'clip_norm = 0.5\ntimeline = "{tmp_path / "timeline.json"}"')
    runs.add("back", with_two_sizes((1, 2), sequence=True), "clip_norm = 0.5")
    runs.launch(3)
    alone = Alone(plan, runs.config("narrower"))
    losses = alone.train(2)
    for name in ("narrower", "back"):
        assert runs.losses(name) == pytest.approx(losses, rel=1e-12)
        assert worst_error(runs.parameters(name), alone.parameters()) < 1e-12
    timeline = MeasuredTimeline.load(tmp_path / "timeline.json")
    assert [(row.name, row.rank) for row in timeline.devices] == [("g0", 0), ("g1", 1)]
    messages = Counter((row.source, row.target) for row in timeline.transfers)
    assert messages == {("g0", "g1"): 2 * 4, ("g1", "g0"): 2 * 4}
    told = {event.device: event.collective_s is not None for event in timeline.operations}
    assert told == {"g0": True, "g1": False}


@pytest.mark.extensive
@pytest.mark.parametrize(("sequence", "shard_optimizer"), [(False, True), (True, False)])
def test_a_checkpoint_is_resumed_on_groups_of_other_sizes(
    tmp_path: Path, sequence: bool, shard_optimizer: bool
) -> None:
    runs = RunFiles(tmp_path, steps=2)
    plan = with_two_sizes((2, 2, 1), shard_optimizer=shard_optimizer, sequence=sequence)
    runs.add("two", plan, "clip_norm = 0.5")
    runs.launch(5)
    resumed = RunFiles(tmp_path / "resumed", steps=4)
    resumed.folder.mkdir()
    checkpoint = str(runs.checkpoints("two"))
    more = with_two_sizes((1, 4), sequence=sequence)
    resumed.add("more", more, "clip_norm = 0.5", resume=checkpoint)
    resumed.launch(5)
    alone = Alone(plan, runs.config("two"))
    losses = alone.train(4)
    assert runs.losses("two") == pytest.approx(losses[:2], rel=1e-12)
    assert resumed.losses("more") == pytest.approx(losses[2:], rel=1e-12)
    assert worst_error(resumed.parameters("more"), alone.parameters()) < 1e-11


@pytest.mark.parametrize(
    ("sync", "run", "emulated", "message"),
    [
        ("decoupled", RunSettings(), False, "'decoupled' is not supported for plans with tens"),
        ("all_reduce", RunSettings(sync_trace="t.json"), False, "--sync-trace: not supported for"),
        ("all_reduce", RunSettings(), True, "--emulate: not supported for plans with tensor"),
    ],
)
def test_what_groups_do_not_do_yet_is_named(
    sync: str, run: RunSettings, emulated: bool, message: str
) -> None:
    plan = positions_and_tied_ends()
    plan = plan.model_copy(update={"sync": plan.sync.model_copy(update={"strategy": sync})})
    with pytest.raises(PipeplanError, match=message):
        require_possible(plan, run, None if emulated else TrainingConfig())
