"""Public layouts, arguments and schedules: the stages and orders of the tools, or both refuse.

The tools run in programs of their own beside this file, from the folder that `make peers` fills.
"""

import json
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import boundary, graph, layer, parameter
from peers import ask_peer, require_peer
from transformers_by_hand import machines

from planner import PipeplanError
from planner.interop.layout import RuntimeLayout
from planner.interop.megatron import read_megatron_arguments
from planner.interop.torchtitan import read_torchtitan_config
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.plan.problem import Problem

HERE = Path(__file__).parent
CASES = tomllib.loads((HERE / "public_layouts.toml").read_text())["case"]
MOST_OPERATIONS = 4000
"""Of a plan whose order is compared; of longer ones only the stages are."""
ELEMENTS = {"wte": 4000, "ln_f": 16, "lm_head": 4000, "loss": 0}
OF_BLOCK = 768

Rows = list[tuple[str, dict[str, Any], dict[str, Any]]]
"""What it is, what adopt makes of it, and the tool's answer."""

pytestmark = pytest.mark.extensive


def cases(tool: str) -> list[dict[str, Any]]:
    return [case for case in CASES if case["tool"] == tool]


def model(blocks: int, ahead: int = 0) -> LayerGraph:
    middle = [f"h.{i}" for i in range(blocks)]
    names = ["wte", *middle, "ln_f", *(f"mtp.{i}" for i in range(ahead)), "lm_head", "loss"]
    elements = {name: ELEMENTS.get(name, OF_BLOCK) for name in names}
    rows = [layer(n, parameters=[f"{n}.weight"] if elements[n] else []) for n in names]
    held = [parameter(f"{n}.weight", elements=count) for n, count in elements.items() if count]
    return graph(rows, [boundary(*pair) for pair in pairwise(names)], parameters=held)


def ours(layout: RuntimeLayout, the_model: LayerGraph) -> dict[str, Any]:
    """What adopt makes of a layout of one pipeline."""
    try:
        one = layout.on(layout.pipeline_size, 1 if layout.replicas is None else None)
        job = Job(precision=layout.precision or "float32")
        fields = {**one.job_fields(job), "optimizer": "sgd", "samples_per_microbatch": 1}
        division = one.divide(the_model)
        count = fields["microbatches"] * len(division)
        if one.table is not None:
            one.table(len(division), fields["microbatches"])
        found: dict[str, Any] = {"stages": list(map(blocks_in, division))}
        if count <= MOST_OPERATIONS:
            problem = Problem(the_model, machines(one.pipeline_size), Job.model_validate(fields))
            found["orders"] = orders(one.adopted(problem).plan)
    except PipeplanError as error:
        return {"refused": str(error)}
    return found


def blocks_in(layers: tuple[str, ...]) -> int:
    return sum(name.startswith("h.") for name in layers)


def orders(plan: Plan) -> list[list[str]]:
    return [plan.orders[name].split() for name in plan.rank_devices]


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether both refuse, or have the same stages, and the same orders where both tell them."""
    if "refused" in ours or "refused" in theirs:
        return "refused" in ours and "refused" in theirs
    told = [" ".join(map(apart, row)) for row in theirs.get("orders", ())]
    both = told and "orders" in ours
    return ours["stages"] == theirs["stages"] and (
        not both or told == list(map(" ".join, ours["orders"]))
    )


def apart(action: str) -> str:
    """An overlapped pair, ``(0F1;1B0)OVERLAP_F_B``, as its two operations."""
    return action.removesuffix("OVERLAP_F_B").strip("()").replace(";", " ")


def differences(found: Rows) -> str:
    return "\n".join(
        f"{source}\n  ours: {json.dumps(a)[:400]}\n  theirs: {json.dumps(b)[:400]}"
        for source, a, b in found
        if not same(a, b)
    )


def by_megatron(texts: dict[str, str], folder: Path) -> Rows:
    """Compare arguments, by their names."""
    require_peer("megatron")
    theirs = ask_peer(HERE / "megatron_peer.py", list(texts.values()))
    rows = []
    for (name, text), told in zip(texts.items(), theirs, strict=True):
        (folder / "args.sh").write_text(text)
        numbers = dict(pairwise(text.split()))
        built = model(int(numbers["--num-layers"]), int(numbers.get("--mtp-num-layers", 0)))
        try:
            mine = ours(read(folder / "args.sh"), built)
        except PipeplanError as error:
            mine = {"refused": str(error)}
        rows.append((name, mine, told))
    return rows


def test_megatron_core_has_the_same_stages_and_orders(tmp_path: Path) -> None:
    rows = by_megatron({case["source"]: case["arguments"] for case in cases("megatron")}, tmp_path)
    assert not differences(rows), differences(rows)
    assert sum("refused" in told for *_, told in rows) <= len(rows) // 3


def read(path: Path) -> RuntimeLayout:
    layout = read_megatron_arguments(path)
    assert layout.tensor_parallel == 1
    return layout


def test_deepspeed_has_the_same_parts(tmp_path: Path) -> None:
    """Over Megatron-DeepSpeed's list of layers, of which ours are what remains."""
    require_peer("deepspeed")
    rows = []
    questions = []
    for case in (found := cases("deepspeed")):
        (tmp_path / "args.sh").write_text(case["arguments"])
        words = case["arguments"].replace("'", "").split()
        numbers = dict(pairwise(words))
        blocks, size = int(numbers["--num-layers"]), int(numbers["--pipeline-model-parallel-size"])
        tied = "--untie-embeddings-and-output-weights" not in words
        method = numbers.get("--pp-partition-method", "type:transformer")
        entries = entries_of(blocks, tied=tied, converts="--bf16" in words)
        questions.append({"entries": entries, "stages": size, "method": method})
        text = case["arguments"] + " --micro-batch-size 1 --global-batch-size 4"
        (tmp_path / "args.sh").write_text(text)
        try:
            stages = [blocks_in(row) for row in read(tmp_path / "args.sh").divide(model(blocks))]
            rows.append({"stages": stages})
        except PipeplanError as error:
            rows.append({"refused": str(error)})
    theirs = ask_peer(HERE / "deepspeed_peer.py", questions)
    told = [stages_of(answer, asked) for answer, asked in zip(theirs, questions, strict=True)]
    compared = list(zip((case["source"] for case in found), rows, told, strict=True))
    assert not differences(compared), differences(compared)


def entries_of(blocks: int, *, tied: bool, converts: bool) -> list[tuple[str, int]]:
    head = ("EmbeddingPipe" if tied else "LMHeadPipe", ELEMENTS["lm_head"])
    around = ("function", 0)
    block = ("ParallelTransformerLayerPipe", OF_BLOCK)
    ends = [around] if converts else []
    embedding = ("EmbeddingPipe", ELEMENTS["wte"])
    norm = ("LayerNorm", ELEMENTS["ln_f"])
    return [around, embedding, around, *[block] * blocks, around, norm, head, *ends]


def stages_of(answer: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The blocks of each stage; one without parameters is refused when its optimizer is made."""
    if "refused" in answer:
        return answer
    held = [asked["entries"][a:b] for a, b in pairwise(answer["parts"])]
    if not all(any(count for _, count in row) for row in held):
        return {"refused": "a stage has no parameters"}
    return {"stages": [sum("Transformer" in kind for kind, _ in row) for row in held]}


def by_torchtitan(asked: dict[str, dict[str, Any]], folder: Path) -> Rows:
    """Compare tables, numbers of blocks and batches, by their names."""
    require_peer("torchtitan")
    theirs = ask_peer(HERE / "torchtitan_peer.py", list(asked.values()))
    rows = []
    for (name, case), told in zip(asked.items(), theirs, strict=True):
        data = {
            "parallelism": {"data_parallel_shard_degree": 1, **case["parallelism"]},
            "training": {"local_batch_size": case["local_batch_size"]},
            "activation_checkpoint": {"mode": "none"},
        }
        (folder / "config.json").write_text(json.dumps(data))
        if case["parallelism"]["pipeline_parallel_schedule"] in ("1F1B", "GPipe"):
            told.pop("orders", None)  # torch makes these while it runs.
        layout = read_torchtitan_config(folder / "config.json")
        rows.append((name, ours(layout, model(case["blocks"])), told))
    return rows


def test_torchtitan_and_torch_have_the_same_stages_and_orders(tmp_path: Path) -> None:
    asked = {
        case["source"]: {key: case[key] for key in case if key not in ("tool", "source")}
        for case in cases("torchtitan")
    }
    rows = by_torchtitan(asked, tmp_path)
    assert not differences(rows), differences(rows)
