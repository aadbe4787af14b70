"""The arguments of Megatron-LM that say how a model is laid out, read from a text file.

Names are those of Megatron-LM d98e8a6, ``megatron/training/arguments.py`` and
``megatron/core/model_parallel_config.py``, and a few of Megatron-DeepSpeed's own
(github.com/bigscience-workshop/Megatron-DeepSpeed, ``megatron/arguments.py``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.records.document import read_text

_NUMBERS = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "num-layers",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "microbatch-group-size-per-virtual-pipeline-stage",
    "micro-batch-size",
    "global-batch-size",
    "recompute-num-layers",
    "checkpoint-num-layers",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
)
_WORDS = (
    "pipeline-model-parallel-layout",
    "recompute-granularity",
    "recompute-method",
    "pp-partition-method",
    "zero-stage",
    "moe-token-dispatcher-type",
    "moe-expert-capacity-factor",
)
_LISTS = ("recompute-modules",)
_SWITCHES = (
    "sequence-parallel",
    "use-distributed-optimizer",
    "use-tp-pp-dp-mapping",
    "overlap-grad-reduce",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "recompute-activations",
    "checkpoint-activations",
    "tp-comm-overlap",
    "overlap-param-gather",
    "bf16",
    "fp16",
)
_REFUSED = {
    "use-megatron-fsdp": "plans keep whole parameters in every pipeline; leave it out",
    "use-custom-fsdp": "plans keep whole parameters in every pipeline; leave it out",
    "use-torch-fsdp2": "plans keep whole parameters in every pipeline; leave it out",
    "rampup-batch-size": "a plan is of one batch size; give that of most iterations alone",
    "step-batch-size-schedule": "a plan is of one batch size; give --global-batch-size alone",
    "mtp-num-layers": "multi-token prediction layers are not supported; leave it out",
    "hybrid-layer-pattern": "stages are of equal blocks; give --pipeline-model-parallel-layout",
    "pipeline-model-parallel-split-rank": "two stacks have no layout; use --stages instead",
    "encoder-num-layers": "two stacks have no layout; use --stages instead",
    "model-parallel-size": "it is an old name; use --tensor-model-parallel-size",
    "batch-size": "it is an old name; use --micro-batch-size",
    "distribute-saved-activations": "plans keep what blocks start from whole; leave it out",
    "cpu-offloading": "plans keep stashes on the device; leave it out",
}
_KNOWN = frozenset((*_NUMBERS, *_WORDS, *_LISTS, *_SWITCHES, *_REFUSED))
_ARRAY = re.compile(r"\w+\+?=\(?")
"""The beginning of a shell array or string: ``GPT_ARGS=(``."""
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
MOST_SCRIPT_BYTES = 2**20


@dataclass
class MegatronArguments:
    """The arguments of a file that say how a model is laid out.

    Attributes:
        source: the file.
        values: words by name, without dashes; a switch has an empty one.
        problems: what is wrong with them.
    """

    source: str
    values: dict[str, str]
    problems: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Return whether an argument was given."""
        return name in self.values

    def word(self, name: str) -> str | None:
        """Return the value of an argument; None if it was not given."""
        return self.values.get(name)

    def number(self, name: str) -> int | None:
        """Return the value of an argument as a number of at least 1; None if it was not given."""
        text = self.values.get(name)
        if text is None:
            return None
        if re.fullmatch("[1-9][0-9]{0,8}", text):
            return int(text)
        hint = "write the value of the variable" if "$" in text else "correct it"
        self.wrong(name, f"{shorten(text)}: expected a whole number of at least 1; {hint}")
        return 1

    def wrong(self, name: str, problem: str) -> None:
        """Note a problem of an argument."""
        self.problems.append(f"{self.source}: --{name}: {problem}")


def read_arguments(path: str | Path) -> MegatronArguments:
    """Read the arguments of a text file, words as a shell reads them; nothing of it is run.

    Args:
        path: of a launch script, or of the arguments alone; ``NAME=( … )`` is an array of them.

    Raises:
        PipeplanError: if quotes do not match, or an argument is shortened or has no value.
    """
    source = str(path)
    found = MegatronArguments(source, {})
    for name, value in _pairs(read_text(Path(path), MOST_SCRIPT_BYTES), source):
        if found.values.setdefault(name, value) != value:
            found.wrong(name, f"{shorten(found.values[name])} and {shorten(value)}; give it once")
        if name in _REFUSED:
            found.wrong(name, _REFUSED[name])
    return found


def _pairs(text: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield the known arguments with their values.

    Raises:
        PipeplanError: if quotes do not match, or an argument is shortened or has no value.
    """
    words = _words(text, source)
    for place, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            continue
        if name not in _KNOWN:
            _refuse_shortened(name, source)
            continue
        if name in _SWITCHES or name in _REFUSED:
            yield name, ""
            continue
        if not equals:
            value = words[place + 1] if place + 1 < len(words) else ""
        if not value or value.startswith("--"):
            raise PipeplanError(f"{source}: --{name}: has no value; write one behind it")
        if name in _LISTS and not equals:
            value = " ".join(takewhile(lambda more: more[:2] != "--", words[place + 1 :]))
        yield name, value


def _words(text: str, source: str) -> list[str]:
    """Return words as a shell would read them; arrays and strings of words are opened.

    Variables have the values that the file gives them before, if these are single words.
    """
    values: dict[str, str] = {}
    found: list[str] = []
    try:
        for word in shlex.split(text.replace("\\\n", " "), comments=True):
            begin = _ARRAY.match(word)
            inside = word[begin.end() :] if begin else word
            if begin and begin[0].endswith("=") and inside:
                values[begin[0].rstrip("+=")] = inside
            found += shlex.split(inside) if begin and "--" in inside else [inside]
    except ValueError as error:
        raise PipeplanError(
            f"{source}: {error}; give a file with Megatron-LM's arguments alone"
        ) from None
    return [_VARIABLE.sub(lambda name: values.get(name[1], name[0]), word) for word in found]


def _refuse_shortened(name: str, source: str) -> None:
    """Refuse what argparse takes for a known argument."""
    meant = [known for known in _KNOWN if len(name) > 5 and known.startswith(name)]
    if len(meant) == 1:
        raise PipeplanError(f"{source}: --{name}: write it in full, --{meant[0]}")
