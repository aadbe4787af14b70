"""Random arguments and schedules: adopt has the stages and orders of the tools, or both refuse."""

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from test_public_layouts import by_megatron, by_torchtitan, differences

COUNT = 50

pytestmark = pytest.mark.extensive


def layout(draw: random.Random, blocks: int, size: int) -> str:
    """Stages at random, some of them empty, and multi-token prediction somewhere behind."""
    stages = [0] * (size * draw.choice((1, 1, 2, 3)) + (draw.random() < 0.1))
    for _ in range(blocks):
        stages[draw.randrange(len(stages))] += 1
    rows = ["t" * count for count in stages]
    ahead = draw.choice((0, 0, 1, 2))
    rows[-1 if draw.random() < 0.7 else draw.randrange(len(rows))] += "m" * ahead
    told = f" --mtp-num-layers {ahead}" if ahead and draw.random() < 0.9 else ""
    return f"--pipeline-model-parallel-layout '{'|'.join(['E' + rows[0], *rows[1:]])}L'{told}"


def numbers(draw: random.Random, size: int) -> str:
    """Numbers of blocks and stages at random.

    Not those of the ends on one rank: megatron-core builds so many blocks there and no others.
    """
    words = []
    if draw.random() < 0.4:
        words.append(f"--num-layers-per-virtual-pipeline-stage {draw.randint(1, 4)}")
    elif draw.random() < 0.5:
        words.append(f"--num-virtual-stages-per-pipeline-rank {draw.randint(1, 3)}")
    for end in ("first", "last"):
        if size > 1 and draw.random() < 0.25:
            words.append(f"--decoder-{end}-pipeline-num-layers {draw.randint(1, 4)}")
    for end in ("embedding", "loss"):
        if draw.random() < 0.2:
            words.append(f"--account-for-{end}-in-pipeline-split")
    return " ".join(words)


def arguments(draw: random.Random) -> str:
    size, blocks = draw.choice((1, 2, 2, 3, 4, 4)), draw.choice((4, 6, 8, 12, 13, 14, 16))
    dealt = layout(draw, blocks, size) if draw.random() < 0.3 else numbers(draw, size)
    turn = f"--microbatch-group-size-per-virtual-pipeline-stage {draw.randint(2, 6)}"
    return (
        f"--num-layers {blocks} --pipeline-model-parallel-size {size} {dealt} "
        f"{'--no-overlap-p2p-communication' if draw.random() < 0.15 else ''} "
        f"{turn if draw.random() < 0.2 else ''} "
        f"--micro-batch-size 1 --global-batch-size {draw.choice((1, 2, 3, 4, 5, 6, 8, 8, 9, 12))}"
    )


def without_empty(told: dict[str, Any], text: str) -> dict[str, Any]:
    """Stages and orders without the empty stages of a layout, which plans do not have."""
    words = dict(zip(shlex.split(text), shlex.split(text)[1:], strict=False))
    rows = words.get("--pipeline-model-parallel-layout", "").split("|")
    if "refused" in told or all(rows) or len(rows) == 1:
        return told
    held = [number for number, row in enumerate(rows) if row]
    orders = [
        [f"{held.index(int(stage))}{kind}{microbatch}" for stage, kind, microbatch in parts]
        for parts in (
            [apart(action) for action in row if apart(action)[0] in held] for row in told["orders"]
        )
    ]
    stages = [told["stages"][number] for number in held]
    return {"stages": stages, "orders": [row for row in orders if row]}


def apart(action: str) -> tuple[int, str, str]:
    kind = "F" if "F" in action else "B"
    stage, microbatch = action.split(kind)
    return int(stage), kind, microbatch


def test_megatron_core_agrees_about_random_arguments(tmp_path: Path) -> None:
    draw = random.Random(0)
    texts = {text: text for text in (arguments(draw) for _ in range(COUNT))}
    compared = by_megatron(texts, tmp_path)
    rows = [(text, mine, without_empty(told, text)) for text, mine, told in compared]
    assert not differences(rows), differences(rows)
    assert sum("refused" not in told for *_, told in rows) > COUNT // 5


SCHEDULES = (
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LoopedBFS",
    "ZBVZeroBubble",
    "DualPipeV",
    "1F1B",
    "GPipe",
)


def test_torchtitan_agrees_about_random_configurations(tmp_path: Path) -> None:
    draw = random.Random(0)
    asked = {}
    for _ in range(COUNT):
        parallelism: dict[str, Any] = {
            "pipeline_parallel_degree": draw.choice((2, 2, 3, 4)),
            "pipeline_parallel_schedule": draw.choice(SCHEDULES),
            "pipeline_parallel_first_stage_less_layers": draw.choice((0, 1, 1, 2)),
            "pipeline_parallel_last_stage_less_layers": draw.choice((0, 1, 1, 2)),
        }
        if draw.random() < 0.4:
            parallelism["pipeline_parallel_layers_per_stage"] = draw.randint(1, 4)
        batch, blocks = draw.randint(1, 12), draw.randint(2, 20)
        case = {"blocks": blocks, "local_batch_size": batch, "parallelism": parallelism}
        asked[json.dumps(case)] = case
    rows = by_torchtitan(asked, tmp_path)
    assert not differences(rows), differences(rows)
    assert sum("refused" not in told for *_, told in rows) > COUNT // 5
