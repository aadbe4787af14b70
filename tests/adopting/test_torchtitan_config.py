"""torchtitan's own configuration as plans, by the names of its versions."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers_by_hand import machines, problem, transformer

from planner import PipeplanError, Plan, verify
from planner.interop.layout import RuntimeLayout
from planner.interop.torchtitan import read_torchtitan_config
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
    assert note.startswith("activation_checkpoint is not given, so nothing is recomputed")


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


SAVED = {"preserve_rng_state": True, "determinism_check": "default", "debug": False}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(SAVED, None), (None, 0), ({"mode": "full"}, None), ({"mode": "none"}, 0)],
)
def test_full_recomputation_is_read_from_a_saved_configuration(
    read: Any, policy: dict[str, Any] | None, expected: int | None
) -> None:
    """0.3.0 saves the fields of the policy's class, or null."""
    layout = read({**pipeline(data_parallel_shard_degree=1), "activation_checkpoint": policy})
    assert (layout.recompute_blocks, layout.notes) == (expected, ())


@pytest.mark.parametrize(
    "text",
    [
        "./run_train.sh --parallelism.pipeline_parallel_degree 2 "
        "--parallelism.pipeline_parallel_schedule=GPipe --training.local-batch-size 4 "
        "--parallelism.data_parallel_shard_degree 1 activation-checkpoint:full",
        "PP=2; ARGS=(--parallelism.pipeline-parallel-degree $PP --training.local_batch_size=4)\n"
        'run "${ARGS[@]}" --parallelism.pipeline_parallel_schedule GPipe '
        "--parallelism.data_parallel_shard_degree 1 --activation_checkpoint.mode full "
        "--training.disable_cuda_graphs --metrics.log_freq 1",
    ],
)
def test_arguments_of_a_command_line_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    found = read_torchtitan_config(tmp_path / "run.sh")
    assert (found.pipeline_size, found.schedule, found.share) == (2, "gpipe", 4)
    assert (found.recompute_blocks, found.notes) == (None, ())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("run --lr 1", "has no argument of torchtitan that lays out a model"),
        ("run --training.local_batch_size $1", "the script computes it, or has it in a branch"),
        ("run --parallelism.pipeline_parallel_degree 2 'x", "No closing quotation"),
        ("run --training.no-disable_cuda_graphs --parallelism.pipeline_parallel_degree 2",
         "refuses CUDA graphs in a pipeline"),
        ("run --parallelism.pp_degree 2", "torchtitan 0.3.0 has no such field; leave it out"),
    ],
)  # fmt: skip
def test_arguments_that_are_not_understood_are_told(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(PipeplanError, match=told):
        read_torchtitan_config(tmp_path / "run.sh")


def test_what_is_off_may_have_any_name(read: Any) -> None:
    assert read(pipeline(enable_loss_trick=False, half_parallel_degree=1)).pipeline_size == 2


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
            {"training": {"batch_size": 6}},
            "training.batch_size: 6: torchtitan 0.3.0 has no such field; leave it out",
        ),
        (
            {"experimental": {"pipeline_parallel_degree": 4}},
            "has no such field; its name is parallelism.pipeline_parallel_degree",
        ),
        (pipeline(pipeline_size=4), "pipeline_size: 4: torchtitan 0.3.0 has no such field; leave"),
        (
            {**pipeline(), "training": {"disable_cuda_graphs": False}},
            "torchtitan 0.3.0 refuses CUDA graphs in a pipeline; set it to true",
        ),
        (
            {
                **pipeline(),
                "activation_checkpoint": {**SAVED, "force_recompute_mm_shapes_by_fqns": []},
            },
            "activation_checkpoint: 'selective': plans recompute whole blocks",
        ),
        (
            {**pipeline(4), "training": {"local_batch_size": 3}},
            "torch does not run it on 3 microbatches, but on 4 or more",
        ),
        (
            {
                **pipeline(pipeline_parallel_schedule="Interleaved1F1B"),
                "training": {"local_batch_size": 7},
            },
            "torch does not run it on 7 microbatches, but on 6 or 8",
        ),
        (
            {
                **pipeline(pipeline_parallel_schedule="DualPipeV"),
                "training": {"local_batch_size": 3},
            },
            "torch does not run it on 3 microbatches, but on 4 or more",
        ),
        (
            pipeline(
                module_fqns_per_model_part=[
                    ["wte", "wpe", "h.0"],
                    ["h.1"],
                    ["h.2"],
                    ["h.3", "ln_f", "lm_head"],
                ]
            ),
            "4 stages on 2 ranks, but it has one stage on every rank",
        ),
        (
            pipeline(
                pipeline_parallel_schedule="ZBVZeroBubble",
                module_fqns_per_model_part=[["wte", "wpe", "h"], ["ln_f", "lm_head"]],
            ),
            "2 stages on 2 ranks, but it has two stages on every rank",
        ),
        (pipeline(context_parallel_degree=2), "context_parallel_degree: 2: context-parallel"),
        (pipeline(4, tensor_parallel_degree=0.5), "tensor_parallel_degree: 0.5: expected a whole"),
        (pipeline(4, pipeline_parallel_schedule="2F2B"), "expected one of 1F1B, GPipe,"),
        (pipeline(4, module_fqns_per_model_part=["h.0"]), "expected a list of names for each"),
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
    ],
)
def test_what_plans_cannot_express_is_told_by_name(
    read: Any, data: dict[str, Any], told: str
) -> None:
    with pytest.raises(PipeplanError) as caught:
        plan_of(read(data), 4, 4, microbatches=8)
    assert told in str(caught.value)
    assert "config.json" in str(caught.value)
