"""torchtitan's own configuration as plans, by the names of its versions."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers_by_hand import machines, problem, transformer

from planner import PipeplanError, Plan, verify
from planner.interop.adopt.layout import RuntimeLayout
from planner.interop.adopt.torchtitan import read_torchtitan_config
from planner.job import Job


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read(data: str | dict[str, Any]) -> RuntimeLayout:
        path = tmp_path / ("config.toml" if isinstance(data, str) else "config.json")
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return read_torchtitan_config(path)

    return read


def pipeline(size: int = 2, **fields: Any) -> dict[str, Any]:
    return {"parallelism": {"pipeline_parallel_degree": size, **fields}}


def plan_of(layout: RuntimeLayout, blocks: int, devices: int, **job: Any) -> Plan:
    layout = layout.on(devices)
    made = Job.model_validate({"optimizer": "sgd", **job})
    fields = {**job, **layout.job_fields(made)}
    told = problem(transformer(blocks, degrees=(2,)), machines(devices), **fields)
    plan = layout.adopted(told).plan
    assert verify(plan) == []
    return plan


def blocks_of(plan: Plan) -> list[int]:
    return [sum(name.startswith("h.") for name in stage.layers) for stage in plan.stages]


@pytest.mark.parametrize(
    ("stages", "blocks", "weights", "expected"),
    [
        (2, 4, (1, 1), [2, 2]),
        (4, 8, (1, 1), [2, 3, 2, 1]),
        (4, 16, (1, 1), [4, 5, 4, 3]),
        (4, 9, (2, 1), [1, 3, 3, 2]),
        (3, 8, (0, 0), [3, 3, 2]),
        (4, 8, (2, 2), [1, 3, 3, 1]),
    ],
)
def test_stages_hold_the_blocks_that_torchtitan_gives_them(
    read: Any, stages: int, blocks: int, weights: tuple[int, int], expected: list[int]
) -> None:
    """What _generate_llm_fqn_per_model_part of torchtitan b5bcd76 returns."""
    first, last = weights
    layout = read(
        pipeline(
            stages,
            pipeline_parallel_first_stage_less_layers=first,
            pipeline_parallel_last_stage_less_layers=last,
        )
    )
    assert blocks_of(plan_of(layout, blocks, stages, microbatches=8)) == expected


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "interleaved1f1b", "ZBVZeroBubble"])
@pytest.mark.parametrize("fields", [{}, {"pipeline_parallel_layers_per_stage": 3}])
def test_ranks_hold_two_stages_where_the_schedule_has_several(
    read: Any, schedule: str, fields: dict[str, Any]
) -> None:
    layout = read(pipeline(2, pipeline_parallel_schedule=schedule, **fields))
    plan = plan_of(layout, 8, 2, microbatches=8)
    assert blocks_of(plan) == [2, 3, 2, 1]
    devices = [stage.devices[0] for stage in plan.stages]
    is_v = schedule == "ZBVZeroBubble"
    assert devices == [f"n{rank}/gpu0" for rank in ((0, 1, 1, 0) if is_v else (0, 1, 0, 1))]


def test_degrees_of_0_2_are_read_from_toml(read: Any) -> None:
    layout = read(
        """
        [training]
        local_batch_size = 8
        global_batch_size = 16
        mixed_precision_param = "bfloat16"

        [parallelism]
        data_parallel_replicate_degree = 2
        data_parallel_shard_degree = 1
        tensor_parallel_degree = 2
        pipeline_parallel_degree = 2
        pipeline_parallel_schedule = "GPipe"
        pipeline_parallel_microbatch_size = 2
        module_fqns_per_model_part = [["wte", "wpe", "h.0"], ["h.1", "ln_f", "lm_head"]]

        [activation_checkpoint]
        mode = "full"
        """
    )
    assert layout.on(8).job_fields(Job(precision="bfloat16")) == {
        "samples_per_microbatch": 2,
        "microbatches": 8,
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "expert_parallel": False,
        "recompute_attention": False,
        "shard_optimizer": False,
        "shard_parameters": False,
    }
    assert layout.recompute_blocks is None
    assert layout.schedule == "gpipe"
    assert layout.replicas == 2
    assert layout.notes == ()


def test_ranks_are_those_of_the_mesh_pp_dp_tp(read: Any) -> None:
    data = pipeline(
        tensor_parallel_degree=2, data_parallel_replicate_degree=2, data_parallel_shard_degree=1
    )
    plan = plan_of(read(data), 2, 8, microbatches=4)
    members = [[plan.members(name) for name in stage.devices] for stage in plan.stages]
    assert members == [
        [("n0/gpu0", "n1/gpu0"), ("n2/gpu0", "n3/gpu0")],
        [("n4/gpu0", "n5/gpu0"), ("n6/gpu0", "n7/gpu0")],
    ]


def test_split_points_of_0_1_begin_stages(read: Any) -> None:
    layout = read(pipeline(3, pipeline_parallel_split_points=["h.1", "ln_f"]))
    stages = layout.divide(transformer(3))
    assert stages == (("wte", "wpe", "h.0"), ("h.1", "h.2"), ("ln_f", "lm_head", "loss"))


def test_batches_counted_in_tokens_are_samples(read: Any) -> None:
    """The names of torchtitan's main branch of August 2026."""
    training = {
        "num_tokens_per_microbatch_per_dp_rank": 4096,
        "num_tokens_per_train_step": 65536,
        "max_context_length": 2048,
    }
    data = pipeline(
        data_parallel_replicate_degree=2, data_parallel_shard_degree=1, num_pp_microbatches=8
    )
    layout = read({**data, "training": training})
    fields = layout.on(4).job_fields(Job())
    assert (fields["samples_per_microbatch"], fields["microbatches"]) == (2, 16)
    assert not fields["sequence_parallel"]


def test_without_a_pipeline_accumulated_batches_are_microbatches(read: Any) -> None:
    training = {"local_batch_size": 4, "global_batch_size": 32}
    data = {"parallelism": {"tensor_parallel_degree": 2}, "training": training}
    fields = read(data).on(2).job_fields(Job())
    assert (fields["samples_per_microbatch"], fields["microbatches"]) == (4, 8)
    assert plan_of(read({"parallelism": {"tensor_parallel_degree": 2}}), 2, 2).degree == 2


def test_a_schedule_file_beside_the_configuration_is_run(read: Any, tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    plan = plan_of(read(pipeline(pipeline_parallel_schedule_csv="order.csv")), 2, 2, microbatches=2)
    assert list(plan.orders.values()) == ["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"]


def test_recomputation_that_is_not_told_is_noted(read: Any) -> None:
    (note,) = read(pipeline(data_parallel_shard_degree=1)).notes
    assert note.startswith("activation_checkpoint.mode is not given, so nothing is recomputed")


@pytest.mark.parametrize(
    ("fields", "size", "expected"),
    [
        ({}, 1, "shard_parameters"),
        ({"fsdp_reshard_after_forward": "always"}, 1, "shard_parameters"),
        ({}, 2, "shard_optimizer"),
        ({"fsdp_reshard_after_forward": "never"}, 2, "shard_optimizer"),
        ({"data_parallel_shard_degree": 2}, 2, "shard_optimizer"),
        ({"tensor_parallel_degree": 2}, 2, "shard_optimizer"),
        ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, 2, None),
        ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, 1, None),
    ],
)
def test_fsdp_is_what_ranks_hold_between_two_microbatches(
    read: Any, fields: dict[str, Any], size: int, expected: str | None
) -> None:
    """Shards of weights and gradients without a pipeline, all of both within one (torch 2.13)."""
    layout = read(pipeline(size, **fields))
    devices = 2 * size * fields.get("tensor_parallel_degree", 1)
    plan = plan_of(layout, 4, devices, microbatches=8)
    assert len(plan.stages[0].devices) == 2
    assert plan.job.shard_parameters == (expected == "shard_parameters")
    assert plan.job.shard_optimizer == (expected == "shard_optimizer")
    is_told = any("FSDP's own share" in note for note in layout.notes)
    assert is_told == (expected == "shard_optimizer")


OLD = {
    "training": {
        "batch_size": 4,
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "fsdp_reshard_after_forward": "never",
    },
    "experimental": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "GPipe",
        "pipeline_parallel_split_points": "h.1",
        "pipeline_parallel_microbatches": 4,
    },
    "activation_checkpoint": {"mode": "full"},
}
NEW = {
    "training": {"local_batch_size": 4},
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "fsdp_reshard_after_forward": "never",
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "GPipe",
        "pipeline_parallel_split_points": ["h.1"],
        "pipeline_parallel_microbatch_size": 1,
    },
    "activation_checkpoint": {"mode": "full"},
}


def test_names_of_february_2025_are_those_of_today(read: Any) -> None:
    """The names of torchtitan 5940dde, and the same by those of 0.1."""
    older, newer = (plan_of(read(data), 3, 4, microbatches=1) for data in (OLD, NEW))
    assert older.job == newer.job
    assert older.stages == newer.stages
    assert older.orders == newer.orders
    assert (older.job.samples_per_microbatch, older.microbatches) == (1, 8)
    assert older.job.shard_optimizer


@pytest.mark.parametrize(("kind", "shares"), [("fsdp", True), (None, True), ("ddp", False)])
def test_one_degree_with_a_type_is_read(read: Any, kind: str | None, shares: bool) -> None:
    """The names before HSDP (torchtitan db6b39a), where all data parallelism was of one kind."""
    training = {"data_parallel_degree": 2, **({"data_parallel_type": kind} if kind else {})}
    layout = read({"training": training, "experimental": {"pipeline_parallel_degree": 2}})
    plan = plan_of(layout, 4, 4, microbatches=8)
    assert plan.job.shard_optimizer == shares
    assert len(plan.stages[0].devices) == 2
    open_degree = {**training, "data_parallel_degree": -1}
    again = read({"training": open_degree, "experimental": {"pipeline_parallel_degree": 2}})
    assert plan_of(again, 4, 4, microbatches=8).job == plan.job


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"training": {}}, "has no table 'parallelism'"),
        (
            pipeline(1, data_parallel_replicate_degree=2, data_parallel_shard_degree=2),
            "parallelism.data_parallel_shard_degree: 2 shards of 2 copies (HSDP)",
        ),
        (
            pipeline(1, data_parallel_replicate_degree=2),
            "parallelism.data_parallel_shard_degree: 2 shards of 2 copies (HSDP)",
        ),
        (pipeline(data_parallel_replicate_degree=4), "4 copies cannot share 2 data-parallel ranks"),
        (
            pipeline(1, tensor_parallel_degree=2),
            "FSDP without a pipeline gathers each layer of tensor-parallel groups",
        ),
        (
            pipeline(fsdp_reshard_after_forward="always"),
            "fsdp_reshard_after_forward: always: a pipeline gathers weights for every microbatch",
        ),
        (
            pipeline(1, fsdp_reshard_after_forward="never"),
            "never: weights are gathered for a microbatch's forward and kept until its backward",
        ),
        (pipeline(fsdp_reshard_after_forward=True), "expected default, always or never"),
        (pipeline(data_parallel_shard_degree=0), "data_parallel_shard_degree: 0: expected a whole"),
        (
            {"training": {"tensor_parallel_degree": 0.5}},
            "training.tensor_parallel_degree: 0.5: expected a whole",
        ),
        (
            {
                "training": {"batch_size": 6},
                "experimental": {"pipeline_parallel_degree": 4},
            },
            "training.batch_size: 6 is no multiple of parallelism.pipeline_parallel_microbatches 4",
        ),
        ({"training": {"data_parallel_type": "zero", "data_parallel_degree": 2}}, "fsdp or ddp"),
        (pipeline(context_parallel_degree=2), "context_parallel_degree: 2: context-parallel"),
        (pipeline(4, tensor_parallel_degree=0.5), "tensor_parallel_degree: 0.5: expected a whole"),
        (pipeline(4, pipeline_parallel_schedule="2F2B"), "expected one of 1F1B, GPipe,"),
        (pipeline(4, module_fqns_per_model_part=["h.0"]), "expected a list of names for each"),
        (pipeline(4, pipeline_parallel_split_points=["h.9"]), "is no module behind the one before"),
        (pipeline(4, pipeline_parallel_layers_per_stage=4), "cannot be 2 stages on 4 pipeline"),
        (
            pipeline(
                pipeline_parallel_layers_per_stage=3,
                pipeline_parallel_schedule="Interleaved1F1B",
                data_parallel_shard_degree=1,
            ),
            "cannot be 2 stages on 2 pipeline ranks",
        ),
        (
            {**pipeline(4), "activation_checkpoint": {"mode": "selective"}},
            "plans recompute whole blocks; use full or none",
        ),
        (
            {**pipeline(4), "training": {"local_batch_size": 4, "global_batch_size": 8}},
            "training.global_batch_size: 8 is not the 4 that all pipelines take at once",
        ),
        (
            {**pipeline(4), "training": {"mixed_precision_param": "bfloat16"}},
            'the job says precision = "float32"',
        ),
        (
            {
                **pipeline(4),
                "training": {
                    "num_tokens_per_microbatch_per_dp_rank": 1000,
                    "max_context_length": 2048,
                },
            },
            "1000 is no multiple of training.max_context_length 2048",
        ),
    ],
)
def test_what_plans_cannot_express_is_told_by_name(
    read: Any, data: dict[str, Any], told: str
) -> None:
    with pytest.raises(PipeplanError) as caught:
        plan_of(read(data), 4, 4, microbatches=8)
    assert told in str(caught.value)
    assert "config.json" in str(caught.value)
