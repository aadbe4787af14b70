"""Megatron-LM's own arguments as plans: stages, ranks, groups and batch are Megatron-LM's."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers_by_hand import machines, problem, transformer

from planner import PipeplanError, Plan, verify
from planner.costs.placement import place_plan
from planner.interop.layout import RuntimeLayout
from planner.interop.megatron import read_megatron_arguments
from planner.job import Job


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read(text: str) -> RuntimeLayout:
        path = tmp_path / "args.sh"
        path.write_text(text)
        return read_megatron_arguments(path)

    return read


def plan_of(layout: RuntimeLayout, blocks: int, devices: int, **job: Any) -> Plan:
    cluster = machines(devices)
    layout = layout.on(devices)
    degrees = (2, 4) if layout.tensor_parallel > 1 else ()
    made = Job.model_validate({"optimizer": "sgd", **job})
    fields = {**job, **layout.job_fields(made)}
    told = problem(transformer(blocks, degrees=degrees), cluster, **fields)
    plan = layout.adopted(told).plan
    assert verify(plan) == []
    return plan


def blocks_of(plan: Plan) -> list[int]:
    return [sum(name.startswith("h.") for name in stage.layers) for stage in plan.stages]


@pytest.mark.parametrize(
    ("blocks", "arguments", "first", "last"),
    [
        (4, "", [1], [4]),
        (8, "", [1, 5], [4, 8]),
        (8, "--num-virtual-stages-per-pipeline-rank 2", [1, 3, 5, 7], [2, 4, 6, 8]),
        (8, "--num-layers-per-virtual-pipeline-stage 2", [1, 3, 5, 7], [2, 4, 6, 8]),
        (
            14,
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            [1, 4, 8, 12],
            [3, 7, 11, 14],
        ),
        (
            14,
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-virtual-stages-per-pipeline-rank 2",
            [1, 2, 4, 6, 8, 10, 12, 14],
            [1, 3, 5, 7, 9, 11, 13, 14],
        ),
        (
            12,
            "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2",
            [1, 3, 7, 11],
            [2, 6, 10, 12],
        ),
        (
            12,
            "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            [1, 2, 4, 6, 7, 8, 10, 12],
            [1, 3, 5, 6, 7, 9, 11, 12],
        ),
        (
            14,
            "--pipeline-model-parallel-layout 'Et|(tt|)*6tL'",
            [1, 2, 4, 6, 8, 10, 12, 14],
            [1, 3, 5, 7, 9, 11, 13, 14],
        ),
    ],
)
def test_stages_hold_the_blocks_that_megatron_gives_them(
    read: Any, blocks: int, arguments: str, first: list[int], last: list[int]
) -> None:
    """First and last layers, from 1, of Megatron-LM's tests/unit_tests/transformer/
    test_cuda_graphs.py (d98e8a6)."""
    size = 4 if len(first) > 2 and blocks > 8 else min(len(first), 2)
    text = f"--pipeline-model-parallel-size {size} --num-layers {blocks} {arguments}"
    plan = plan_of(read(text), blocks, size, microbatches=8)
    numbered = [
        [int(name.removeprefix("h.")) + 1 for name in stage.layers if name.startswith("h.")]
        for stage in plan.stages
    ]
    assert [row[0] for row in numbered] == first
    assert [row[-1] for row in numbered] == last
    assert [stage.devices for stage in plan.stages[:size]] == [
        stage.devices for stage in plan.stages[-size:]
    ]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_ranks_count_as_megatron_counts_them(read: Any, degree: int) -> None:
    """tp-cp-ep-dp-pp, the first fastest (parallel_state.py)."""
    size, replicas = 2, 3
    text = (
        f"--tensor-model-parallel-size {degree} --pipeline-model-parallel-size {size} "
        "--micro-batch-size 1 --global-batch-size 6"
    )
    plan = plan_of(read(text), 2, degree * size * replicas)
    names = plan.cluster.device_names
    for stage, replica in product(range(size), range(replicas)):
        place = replica + replicas * stage
        expected = names[place * degree : (place + 1) * degree]
        held = plan.stages[stage].devices[replica]
        assert plan.members(held) == expected
        assert list(plan.ranks_of(held)) == [names.index(name) for name in expected]
        assert f"{stage}F{replica}" in plan.orders[held].split()


def test_groups_share_the_work_of_1f1b(read: Any) -> None:
    """Two stages of 1.2 + 2.4 s on one device and half on two; 4 microbatches: 5 turns of them."""
    for degree in (1, 2, 4):
        text = f"--tensor-model-parallel-size {degree} --pipeline-model-parallel-size 2"
        plan = plan_of(read(text), 2, 2 * degree, microbatches=4)
        # The embedding is of two layers, norm, head and loss are three: 0.3 and 0.9 s more.
        turn_s, last_s = 1.2 * 3 / degree, 1.3 * 3 / degree
        expected_s = turn_s / 3 + 4 * last_s + turn_s * 2 / 3
        assert plan.predicted.iteration_time_s == pytest.approx(expected_s, rel=1e-6)
        assert plan.degree == degree
        assert plan.job.tensor_parallel == degree


def test_a_launch_script_is_read_as_a_shell_reads_it(read: Any) -> None:
    layout = read(
        """#!/bin/bash
        TP=4   # a group
        GPT_ARGS=(
            --num-layers 8 --hidden-size 64
            --micro-batch-size=2
            --bf16
        )
        MORE="--global-batch-size 64 --tensor-model-parallel-size ${TP} \\
              --recompute-granularity full --recompute-method block --recompute-num-layers 3"
        torchrun --nproc-per-node 8 $DISTRIBUTED pretrain_gpt.py ${GPT_ARGS[@]} $MORE \\
            --sequence-parallel --overlap-grad-reduce --lr 1e-4
        """
    )
    assert (layout.tensor_parallel, layout.sequence_parallel) == (4, True)
    assert layout.on(8).job_fields(Job(precision="bfloat16")) == {
        "samples_per_microbatch": 2,
        "microbatches": 32,
        "tensor_parallel": 4,
        "sequence_parallel": True,
        "recompute_attention": False,
        "shard_optimizer": False,
        "expert_parallel": False,
        "overlap_reduction": True,
    }
    assert layout.recompute_blocks == 3


SAME = {
    "dashes.sh": "run --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 3",
    "underscores.sh": "run --tensor_model_parallel_size 2 --sequence_parallel true "
    "--micro_batch_size=3",
    "semicolons.sh": "TP=2; MBS=3  # both\nA=(--sequence-parallel); A+=(--micro-batch-size $MBS);"
    'run --tensor-model-parallel-size $TP "${A[@]}"',
    "defaults.sh": 'export TP=${TP:-2}\nC="run --tensor-model-parallel-size ${TP} '
    '--sequence-parallel --micro-batch-size 3"\neval $C',
    "windows.sh": "run --tensor-model-parallel-size 2 \\\r\n--sequence-parallel \\\r\n"
    "--micro-batch-size 3\r\n",
    "values.json": '{"args": {"tensor_model_parallel_size": 2, "sequence_parallel": true, '
    '"micro_batch_size": 3}}',
    "hydra.sh": "run model.tensor_model_parallel_size=2 ++model.sequence_parallel=true "
    "model.micro_batch_size=3",
    "nested.yaml": "MODEL_ARGS:\n  --tensor-model-parallel-size: 2\n  --sequence-parallel: true\n"
    "  --micro-batch-size: 3\n  --bf16: false",
    "fields.yml": "model: {tensor_model_parallel_size: 2, sequence_parallel: yes}\n"
    "micro_batch_size: 3\npipeline_model_parallel_layout: null",
}


@pytest.mark.parametrize("name", SAME)
def test_arguments_are_the_same_in_any_spelling(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(SAME[name])
    found = read_megatron_arguments(tmp_path / name)
    assert (found.tensor_parallel, found.sequence_parallel) == (2, True)
    assert (found.samples_per_microbatch, found.precision) == (3, None)
    assert found.notes == (("TP is 2 unless the environment sets it",) if "def" in name else ())


@pytest.mark.parametrize(
    ("method", "size", "expected"),
    [
        ("type:transformer", 5, [3, 3, 2, 2, 2]),
        ("'type:transformer|embedding'", 4, [3, 4, 3, 2]),
        ("uniform", 4, [2, 5, 4, 1]),
        ("parameters", 3, [4, 6, 2]),
    ],
)
def test_deepspeed_deals_out_blocks_by_its_methods(
    read: Any, method: str, size: int, expected: list[int]
) -> None:
    """18 entries with conversions: 5, 5, 4, 4 by ``uniform``; 2, 12, 1, 2 tensors: 6, 6, 5."""
    layout = read(
        f"--deepspeed --pipeline-model-parallel-size {size} --pp-partition-method {method}"
    )
    assert blocks_of(plan_of(layout, 12, size, microbatches=4)) == expected


@pytest.mark.parametrize(
    ("layout", "size", "expected", "first"),
    [
        ("Et||ttL", 3, ["n0/gpu0", "n2/gpu0"], "0F0 0F1 0F2 0B0"),
        ("E|tt||tL", 2, ["n0/gpu0", "n1/gpu0", "n1/gpu0"], "0F0 0F1 0F2 0F3 0B0"),
    ],
)
def test_an_empty_stage_keeps_its_place_in_the_order(
    read: Any, layout: str, size: int, expected: list[str], first: str
) -> None:
    """On three ranks rank 0 is two forwards ahead; of a stage out of two the other runs alone."""
    text = (
        f"--pipeline-model-parallel-size {size} --pipeline-model-parallel-layout '{layout}' "
        "--micro-batch-size 1 --global-batch-size 4"
    )
    found = read(text)
    plan = plan_of(found, 3, size)
    assert [stage.devices[0] for stage in plan.stages] == expected
    assert plan.orders["n0/gpu0"].startswith(first)
    assert "is empty: Megatron-LM sends activations" in found.notes[0]


def test_other_numbers_of_microbatches_in_turn_are_run_in_turn(read: Any) -> None:
    """Ten of them, three in turn on two ranks: rank 0 runs 3 + 2 forwards ahead, and one more."""
    text = (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 5 --micro-batch-size 1 "
        "--global-batch-size 10"
    )
    plan = plan_of(read(text), 4, 2)
    first = plan.orders["n0/gpu0"].split()
    assert first[:9] == ["0F0", "0F1", "0F2", "0F3", "0F4", "2F0", "2F1", "2F2", "2B0"]


def test_the_first_blocks_of_every_stage_run_again(read: Any) -> None:
    text = (
        "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-num-layers 1 "
        "--recompute-method "
    )
    block, uniform = (plan_of(read(text + method), 4, 2) for method in ("block", "uniform"))
    assert [stage.recompute for stage in block.stages] == [("h.0",), ("h.2",)]
    assert [stage.recompute for stage in uniform.stages] == [("h.0", "h.1"), ("h.2", "h.3")]


def test_a_script_of_megatron_deepspeed_is_read(read: Any) -> None:
    """As of BLOOM: embedding and head count as blocks, every block runs again, ZeRO-1."""
    layout = read(
        """
        ZERO_STAGE=1
        GPT_ARGS=" \\
            --pp-partition-method 'type:transformer|embedding' \\
            --num-layers 6 --micro-batch-size 2 --global-batch-size 8 --bf16 \\
            --checkpoint-activations \\
            "
        CMD="pretrain_gpt.py --pipeline-model-parallel-size 4 --zero-stage ${ZERO_STAGE} $GPT_ARGS"
        """
    )
    assert layout.recompute_blocks is None
    assert layout.on(8).job_fields(Job(precision="bfloat16"))["shard_optimizer"] is True
    assert [sum("h." in name for name in row) for row in layout.divide(transformer(6))] == [
        1,
        2,
        2,
        1,
    ]


def test_whole_experts_of_tensor_parallel_groups_are_taken_over(read: Any) -> None:
    text = (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"
    )
    layout = read(text)
    assert layout.expert_parallel
    fields = layout.on(4).job_fields(Job())
    assert (fields["tensor_parallel"], fields["expert_parallel"]) == (2, True)
    assert not read("--tensor-model-parallel-size 2").expert_parallel


def test_sequence_parallelism_of_one_device_is_none(read: Any) -> None:
    """Megatron-LM turns it off there (arguments.py)."""
    assert not read("--sequence-parallel").sequence_parallel


def test_a_distributed_optimizer_shares_its_state_among_pipelines(read: Any) -> None:
    """Adam's two moments in float32, 8 bytes of an element, halved between two pipelines."""
    text = "--use-distributed-optimizer --pipeline-model-parallel-size 2 --global-batch-size 4"
    shared = plan_of(read(text), 4, 4, optimizer="adamw")
    whole = plan_of(
        read(text.removeprefix("--use-distributed-optimizer ")), 4, 4, optimizer="adamw"
    )
    assert (shared.job.shard_optimizer, whole.job.shard_optimizer) == (True, False)
    assert plan_of(read(text), 4, 2, optimizer="adamw").job.shard_optimizer is False
    for one, other in zip(place_plan(whole).stages, place_plan(shared).stages, strict=True):
        held = whole.problem.graph.parameters_of(one.spec.layers)
        elements = [row.elements for row in held]
        state = sum(8 * (count - -(-count // 2)) for count in elements)
        assert one.static_bytes - other.static_bytes == state


def test_attention_runs_again_in_selective_recomputation(read: Any) -> None:
    for text in (
        "--recompute-granularity selective",
        "--recompute-activations",
        "--recompute-granularity selective --recompute-modules core_attn --bf16",
    ):
        found = read(text)
        assert (found.recompute_attention, found.recompute_blocks) == (True, 0)
        fields = found.on(1).job_fields(Job(precision=found.precision or "float32"))
        assert fields["recompute_attention"] is True


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--context-parallel-size 2", "context parallel groups are not planned; set it to 1"),
        ("--use-tp-pp-dp-mapping", "give the devices in the order of tp, dp, pp (--devices)"),
        ("--zero-stage 2", "'2': expected 0, or 1 for an optimizer's state that pipelines share"),
        (
            "--pp-partition-method profile --pipeline-model-parallel-size 2",
            "profile: expected uniform, parameters or type:NAME",
        ),
        (
            "--pp-partition-method type:mlp --pipeline-model-parallel-size 2",
            "0 layers of that type for 2 pipeline ranks",
        ),
        (
            "--deepspeed --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            "DeepSpeed's pipeline has --pp-partition-method alone; leave it out",
        ),
        (
            "--pp-partition-method parameters --pipeline-model-parallel-size 2 "
            "--tensor-model-parallel-size 2",
            "DeepSpeed counts those of a rank",
        ),
        ("--no-pipeline-parallel --deepspeed --pipeline-model-parallel-size 2", "leave one of"),
        ("--mtp-num-layers 1", "m appears 1 times, but the model has 0 blocks of multi-token"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ett|ttmL'",
            "--mtp-num-layers 0: the layout has 1 m; make them equal",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|ttt|m|L' "
            "--mtp-num-layers 1",
            "m appears 1 times",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|tttm||L' "
            "--mtp-num-layers 1",
            "m is in stage 1, but Megatron-LM has it in the last stage of a rank, one of the last",
        ),
        ("--standalone-embedding-stage", "is no argument of Megatron-LM known here; correct it"),
        ("--pipeline-parallel-degree 2", "is no argument of Megatron-LM known here; correct it"),
        ("--use-checkpoint-args", "the checkpoint's arguments are not in the file; paste them"),
        ("", "has no argument of Megatron-LM that lays out a model"),
        ("python pretrain_gpt.py --lr 1e-4", "has no argument of Megatron-LM that lays out"),
        ("TP=1; [ $# = 0 ] && TP=2; run --tensor-model-parallel-size $TP", "paste the arguments"),
        (
            "if true; then A=(--num-layers 4); fi; run --bf16 ${A[@]}",
            "--num-layers: '4': the script computes it, or has it in a branch",
        ),
        ("run --micro-batch-size $((4 / 2))", "paste the arguments"),
        ("run --bf16 $(cat arguments)", "paste the arguments"),
        ("--checkpoint-activations --checkpoint-num-layers 2", "set it to 1"),
        ("--recompute-granularity most", "'most': expected full or selective"),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp --bf16",
            "'core_attn mlp': of selective recomputation plans have core_attn alone",
        ),
        (
            "--recompute-activations --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            "is selective, but --recompute-granularity is full",
        ),
        ("--expert-model-parallel-size 8", "whole experts to the devices of a tensor-parallel"),
        (
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2",
            "2 with --expert-tensor-parallel-size 2: plans give whole experts",
        ),
        (
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
            "experts in other shares than the rest are not planned; set it to 2",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
            "--moe-token-dispatcher-type: 'allgather, the default'",
        ),
        (
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall "
            "--moe-expert-capacity-factor 1.0",
            "plans drop no tokens; leave it out",
        ),
        ("--recompute-granularity full", "full needs --recompute-method uniform or block"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            "not one in 2; set it to 1",
        ),
        ("--use-megatron-fsdp", "plans keep whole parameters in every pipeline"),
        ("--rampup-batch-size 16 16 100", "a plan is of one batch size"),
        ("--tensor-model-parallel-size $TP", "'$TP': the script computes it, or has it in a"),
        ("--tensor-model-parallel-size 0", "expected a whole number of at least 1"),
        ("--tensor-model-parallel-size --bf16", "--tensor-model-parallel-size: has no value"),
        ("--tensor-model-parallel 2", "write it in full, --tensor-model-parallel-size"),
        ("--num-layers 4 --num-layers 8", "'4' and '8'; give it once"),
        ("--num-layers '4", "No closing quotation; give a file"),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2",
            "Megatron-LM does not take it with --num-virtual-stages-per-pipeline-rank; give one",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t|tL'",
            "3 stages on 2 pipeline ranks; make it a multiple",
        ),
        ("--bf16 --fp16", "--bf16 is given as well"),
        ("--bf16", 'the job says precision = "float32"; set precision = "bfloat16"'),
        ("--micro-batch-size 3 --global-batch-size 8", "is no multiple of --micro-batch-size 3"),
        (
            "--micro-batch-size 1 --global-batch-size 9",
            "9 microbatches of 1 cannot be shared out equally among 4 pipelines; make "
            "--global-batch-size a multiple of 4",
        ),
        ("--tensor-model-parallel-size 3", "of which the 4 of the cluster are no multiple"),
        ("--num-layers 6", "--num-layers 6: the model has 4 blocks; make them equal"),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
            "4 blocks cannot be dealt out equally to 8 stages on 4 pipeline ranks",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 "
            "--account-for-loss-in-pipeline-split --decoder-last-pipeline-num-layers 1",
            "--decoder-last-pipeline-num-layers: Megatron-LM does not take it with --account-for-",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            "does not interleave 2 stages a rank on as many ranks; use more ranks",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 "
            "--no-overlap-p2p-communication",
            "and --no-overlap-p2p-communication; use more ranks, or one stage a rank",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 "
            "--micro-batch-size 1 --global-batch-size 10",
            "interleaved 1F1B takes 4 or 6 microbatches; change --global-batch-size",
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 "
            "--decoder-last-pipeline-num-layers 2",
            "4 blocks cannot be dealt out equally to 4 stages on 4 pipeline ranks",
        ),
    ],
)
def test_what_plans_cannot_express_is_told_by_name(read: Any, text: str, told: str) -> None:
    with pytest.raises(PipeplanError) as caught:
        plan_of(read(text), 4, 4, microbatches=8)
    assert told in str(caught.value)
    assert "args.sh" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--bf16", "float32"),
        ("--bf16 --grad-reduce-in-bf16", "weights"),
        ("--fp16", "weights"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "float32"),
        ("", None),
    ],
)
def test_the_type_of_sums_of_gradients_is_megatrons(
    arguments: str, expected: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "arguments.txt"
    path.write_text(f"--num-layers 4 {arguments}\n")
    assert read_megatron_arguments(path).gradient_precision == expected
