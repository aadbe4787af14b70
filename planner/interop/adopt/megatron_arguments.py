"""The arguments of Megatron-LM that say how a model is laid out, read from a text file.

Names are those of Megatron-LM d98e8a6, ``megatron/training/arguments.py``, of the fields that these
set in ``TransformerConfig`` of megatron-core 0.16.1, and of ``megatron/arguments.py`` of
Megatron-DeepSpeed (github.com/bigscience-workshop and deepspeedai). Dashes and underscores are the
same. A name that is not known here, but has a word in it that could concern the layout, is refused:
what was not understood never becomes a default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.script import Script, Word
from planner.records.document import read_text

_WITH_VALUE = frozenset(
    """tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
    expert-model-parallel-size expert-tensor-parallel-size num-layers mtp-num-layers
    num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
    microbatch-group-size-per-virtual-pipeline-stage micro-batch-size global-batch-size
    pipeline-model-parallel-layout recompute-granularity recompute-method recompute-num-layers
    recompute-modules checkpoint-num-layers pp-partition-method zero-stage
    moe-token-dispatcher-type moe-expert-capacity-factor
    data-parallel-sharding-strategy""".split()
)
_SWITCHES = frozenset(
    """sequence-parallel use-distributed-optimizer overlap-grad-reduce
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
    recompute-activations checkpoint-activations tp-comm-overlap overlap-param-gather
    no-overlap-p2p-communication untie-embeddings-and-output-weights deepspeed
    no-pipeline-parallel bf16 fp16 accumulate-allreduce-grads-in-fp32
    grad-reduce-in-bf16""".split()
)
_REFUSED = {
    "use-megatron-fsdp": "plans keep whole parameters in every pipeline; leave it out",
    "use-torch-fsdp2": "plans keep whole parameters in every pipeline; leave it out",
    "rampup-batch-size": "a plan is of one batch size; give that of most iterations alone",
    "hybrid-layer-pattern": "stages are of equal blocks; give --pipeline-model-parallel-layout",
    "num-distributed-optimizer-instances": "all pipelines share one optimizer state; leave it out",
    "use-checkpoint-args": "the checkpoint's arguments are not in the file; paste them",
    "yaml-cfg": "the arguments are in another file; give that one",
    "heterogeneous-layers-config-path": "blocks are counted as equal; give the stages (--stages)",
    "distribute-saved-activations": "plans keep what blocks start from whole; leave it out",
    "use-tp-pp-dp-mapping": (
        "replicas of a stage are neighbours here; leave it out, and give the devices in the order "
        "of tp, dp, pp (--devices)"
    ),
    "cpu-offloading": "plans keep stashes on the device; leave it out",
    "fine-grained-activation-offloading": "plans keep stashes on the device; leave it out",
}
_ALIASES = {
    "tensor-parallel-size": "tensor-model-parallel-size",
    "pipeline-parallel-size": "pipeline-model-parallel-size",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "deepspeed-config": "deepspeed",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
}
"""Names of the same thing: fields of ``TransformerConfig``, which frameworks around it take."""
_KNOWN = _WITH_VALUE | _SWITCHES | _REFUSED.keys()
_CONCERNS = re.compile(
    r"(?:^|-)(?:pipeline|parallel|parallelism|pp|tp|dp|cp|vpp|virtual|stages?|micro|microbatch"
    r"|microbatches|batch|gbs|mbs|recompute|recomputation|interleaved?|layers|partition|fsdp|hsdp"
    r"|zero|offload|offloading|mtp|activations|p2p)(?:-|$)"
)
_UNRELATED = re.compile(
    # Messages, precision, experts, checkpoints, evaluation, inference: they divide nothing.
    r"""cp-comm-type|tp-comm-.*|batch-p2p-.*|overlap-p2p-communication.*|(?:no-)?ckpt-.*|dist-ckpt-.*
    |.*-(?:start|end)-in-bf16|pipeline-model-parallel-comm-backend|data-parallel-random-init
    |deepspeed-.*|partition-activations|contigious-checkpointing|zero-.*|eval-.*
    |mtp-.*|inference-.*|rl-.*|vllm-.*|check-.*|offload-(?:model|bridge|optimizer|teacher-model)
    |first-last-layers-.*|rotary-.*|async-tensor-model-parallel-allreduce
    |no-async-tensor-model-parallel-allreduce|expert-.*|moe-.*|megatron-fsdp-.*|fsdp-.*
    |overlap-moe-expert-parallel-comm|num-layers-at-.*|optimizer-.*offload.*|.*-optimizer-.*
    |use-torch-optimizer-for-cpu-offload|sequence-parallel-.*|freeze-.*|muon-tp-mode
    |use-same-sampling-seed-across-dp-ranks|decrease-batch-size-if-needed|indexer-batch-size
    |context-parallel-.*|hierarchical-context-parallel-sizes|checkpoint-in-cpu|synchronize-.*
    |profile-.*|log-.*|save-.*|load-.*|test-.*|lora-.*|ds-.*|aux-.*|vit-.*|per-device-eval-.*""",
    re.VERBOSE,
)
_OFF = ("false", "0", "off", "no")
_OVERRIDE = re.compile(r"[+]{0,2}(?:[a-z0-9_]+\.)+([a-z0-9_]+)=(.*)", re.DOTALL)
"""A value as Hydra takes it, such as NeMo's ``trainer.strategy.pipeline_model_parallel_size=2``."""
_SUBSTITUTION = re.compile(r"\$\((?!\().*\)|`.*`", re.DOTALL)
MOST_SCRIPT_BYTES = 2**20
PASTE = (
    "the script computes it, or has it in a branch, a loop or a function, and is not executed; "
    "paste the arguments with their values"
)


@dataclass
class MegatronArguments:
    """The arguments of a file that say how a model is laid out.

    Attributes:
        source: the file.
        values: words by name, without dashes; a switch has an empty one.
        problems: what is wrong with them.
        notes: what depends on more than the file.
    """

    source: str
    values: dict[str, str]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Return whether an argument was given."""
        return name in self.values

    def number(self, name: str) -> int | None:
        """Return the value of an argument as a number of at least 1; None if it was not given."""
        text = self.values.get(name)
        if text is None or (name == "mtp-num-layers" and text == "0"):
            return None
        if re.fullmatch("[1-9][0-9]{0,8}", text):
            return int(text)
        self.wrong(name, f"{shorten(text)}: expected a whole number of at least 1; correct it")
        return 1

    def wrong(self, name: str, problem: str) -> None:
        """Note a problem of an argument."""
        self.problems.append(f"{self.source}: --{name}: {problem}")


def read_arguments(path: str | Path) -> MegatronArguments:
    """Read the arguments of a text file; nothing of it is run.

    Args:
        path: of a launch script, of the arguments alone, or of YAML or JSON with a value for each
            name, as Megatron-LM's tests and frameworks around it have.

    Raises:
        PipeplanError: if it cannot be read, or names no argument that lays a model out.
    """
    source, text = str(path), read_text(Path(path), MOST_SCRIPT_BYTES)
    found = MegatronArguments(source, {})
    is_mapping = Path(path).suffix in (".yaml", ".yml", ".json")
    for name, value, is_literal in (_of_yaml if is_mapping else _of_script)(text, found):
        _take(found, name, value, is_literal=is_literal)
    if not found.values and not found.problems:
        raise PipeplanError(
            f"{source}: has no argument of Megatron-LM that lays out a model, such as "
            "--pipeline-model-parallel-size or --micro-batch-size; paste the arguments of the run"
        )
    return found


def _take(found: MegatronArguments, name: str, value: str, *, is_literal: bool) -> None:
    """Note an argument, or what is wrong with it."""
    if name not in _KNOWN:
        if _CONCERNS.search(name) and not _UNRELATED.fullmatch(name):
            meant = [known for known in sorted(_KNOWN) if known.startswith(name)]
            remedy = f"write it in full, --{meant[0]}" if len(meant) == 1 else "leave it out"
            found.wrong(name, f"is no argument of Megatron-LM known here; correct it, or {remedy}")
    elif not is_literal:
        found.wrong(name, f"{shorten(value)}: {PASTE}" if value else PASTE)
    elif name in _REFUSED:
        found.wrong(name, _REFUSED[name])
    elif found.values.setdefault(name, value) != value:
        found.wrong(name, f"{shorten(found.values[name])} and {shorten(value)}; give it once")


_Argument = tuple[str, str, bool]
"""The name of an argument, its value, and whether the file alone gives both."""


def _of_script(text: str, found: MegatronArguments) -> Iterator[_Argument]:
    """Yield the arguments of a launch script.

    Raises:
        PipeplanError: if a quotation is not closed, a known argument has no value, or a word may
            hide some.
    """
    try:
        script = Script.of(text)
    except ValueError as error:
        raise PipeplanError(
            f"{found.source}: {error}; give a file with Megatron-LM's arguments alone"
        ) from None
    words = script.words
    found.notes += dict.fromkeys(script.notes)
    is_value = False
    for place, word in enumerate(words):
        override = _OVERRIDE.fullmatch(word.text)
        if override and (name := _normal(override[1])) in _KNOWN:
            value = override[2]
            if name not in _SWITCHES or value.lower() not in _OFF:
                yield name, "" if name in _SWITCHES else value, word.is_literal
        elif word.text.startswith("--"):
            given, equals, _ = word.text[2:].partition("=")
            is_value = not equals and _normal(given) not in _SWITCHES
            yield from _of_option(found, word, words[place + 1 :])
        else:
            if not is_value:
                _require_read(found, word)
            is_value = False


def _require_read(found: MegatronArguments, word: Word) -> None:
    """Refuse a word that may stand for arguments, unless it is a variable that is not set."""
    if _SUBSTITUTION.fullmatch(word.text):
        raise PipeplanError(f"{found.source}: {shorten(word.text)}: {PASTE}")
    if word.text.startswith("$") and not word.is_literal:
        found.notes.append(f"{shorten(word.text)} is not set in the file: taken as empty")


def _of_option(
    found: MegatronArguments, word: Word, following: Sequence[Word]
) -> Iterator[_Argument]:
    """Yield the argument of an option and the words behind it; a switch only if it is on."""
    given, equals, value = word.text[2:].partition("=")
    name = _normal(given)
    values = list(takewhile(lambda more: not more.text.startswith("--"), following))
    if equals:
        values = [Word(value, word.is_literal)]
    if name in _SWITCHES:
        if not values or values[0].text.lower() not in _OFF or name == "deepspeed":
            yield name, "", word.is_literal
        return
    if not values and name in _WITH_VALUE:
        raise PipeplanError(f"{found.source}: --{name}: has no value; write one behind it")
    taken = values if name == "recompute-modules" else values[:1]
    text = " ".join(more.text for more in taken)
    yield name, text, all(more.is_literal for more in (word, *taken))


def _normal(name: str) -> str:
    name = name.lstrip("-").rpartition(".")[2].replace("_", "-")
    return _ALIASES.get(name, name)


class _PlainYaml(yaml.SafeLoader):  # type: ignore[misc]
    """A loader without anchors, by which a small file can stand for an endless one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it refers to an anchor; write the values out")
        return super().compose_node(parent, index)


def _of_yaml(text: str, found: MegatronArguments) -> Iterator[_Argument]:
    """Yield arguments with their values, in whatever mappings they are.

    Raises:
        PipeplanError: if it is no YAML of mappings.
    """
    try:
        data = yaml.load(text, _PlainYaml)
    except (yaml.YAMLError, RecursionError) as error:
        raise PipeplanError(f"{found.source}: {shorten(str(error), 200)}; expected YAML") from None
    if not isinstance(data, Mapping):
        raise PipeplanError(f"{found.source}: expected a mapping of arguments to values")
    yield from _of_mapping(data)


def _of_mapping(data: Mapping[Any, Any]) -> Iterator[_Argument]:
    for key, value in data.items():
        name = _normal(str(key))
        if isinstance(value, Mapping):
            yield from _of_mapping(value)
        elif isinstance(value, list):
            is_layout = name == "pipeline-model-parallel-layout"
            yield name, _layout_of(value) if is_layout else " ".join(map(str, value)), True
        elif value is not None and value is not False:
            yield name, "" if value is True else str(value), "$" not in str(value)


def _layout_of(stages: list[Any]) -> str:
    """Return a layout of lists of names, megatron-core's other form, as a string."""
    symbols = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    rows = ((stage if isinstance(stage, list) else [stage]) for stage in stages)
    return "|".join("".join(symbols.get(str(name), str(name)) for name in row) for row in rows)
