"""Models of Hugging Face ``transformers`` by name: ``hf:ClassName`` and ``hf:CONFIG.json``.

Only classes of the installed library are built, with new weights: no code of a checkpoint runs and
nothing is downloaded. The model stays an instance of its class, so that its parameters keep their
names; its forward takes tensors by name and returns one tensor. Experts compute by the operations
that Pipeplan divides over groups.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import PipeplanError, near, shorten
from planner.records.document import read_json
from planner.tracing.expert_operations import (
    combine_experts,
    dispatch_to_experts,
    expert_offsets,
    grouped_product,
)

PREFIX = "hf:"
_MOST_TOKENS = 2048  # Of a default; longer ones by choice.
_DEFAULT_TOKENS, _DEFAULT_PIXELS = 512, 224
_IMAGES = "image classification"
_KINDS = {
    "sequence to sequence": ("SEQ_TO_SEQ_CAUSAL_LM", ("input_ids", "decoder_input_ids")),
    "causal language model": ("CAUSAL_LM", ("input_ids",)),
    "masked language model": ("MASKED_LM", ("input_ids",)),
    _IMAGES: ("IMAGE_CLASSIFICATION", ("pixel_values",)),
}
"""What a model is for, by the library's own tables, and its inputs; the first table counts."""
# These may fetch code or weights, or choose what cannot be exported.
_RESERVED = frozenset(
    "attn_implementation experts_implementation auto_map quantization_config use_cache "
    "return_dict use_kernels".split()
)
_TAKEN_OUT = {
    "auto_map": " names code of the checkpoint's author, which Pipeplan does not run; remove "
    "auto_map if transformers has the class in architectures itself, else give your own "
    "module:factory",
    "quantization_config": ": only weights that are not quantised can be trained; remove it and "
    "choose a precision in the job file",
}


def factory_of(name: str) -> Callable[..., nn.Module]:
    """Return the factory of ``hf:ClassName`` or ``hf:CONFIG.json``.

    Its keyword arguments are fields of the configuration and ``sequence_length``, the tokens of the
    example batch: by default the number of positions of the model, but at most 2048, and 512 if the
    configuration has no such number. Models of images whose configuration has no ``image_size``
    take one for the example batch, default 224.

    Args:
        name: with its prefix. A class starts from its default configuration; a file is a
            checkpoint's ``config.json``, whose ``architectures`` names the class.

    Raises:
        PipeplanError: if transformers is not installed, the class or file does not exist, or the
            model is of no supported kind.
    """
    wanted = name.removeprefix(PREFIX)
    if (Path(wanted) / "config.json").is_file():
        raise PipeplanError(
            f"model {name!r} is a folder; name its configuration: {name.rstrip('/')}/config.json"
        )
    recorded = _read(name, Path(wanted)) if is_configuration_file(name) else {}
    return _Factory(name, recorded["architectures"][0] if recorded else wanted, recorded)


def is_configuration_file(name: str) -> bool:
    """Return whether a model is named by the path of a configuration, ``hf:CONFIG.json``."""
    return name.startswith(PREFIX) and name.endswith(".json")


def _refused(name: str, words: str) -> PipeplanError:
    return PipeplanError(f"model {name!r}: {words}")


def _read(name: str, path: Path) -> dict[str, Any]:
    """Return the fields of a configuration file that names one class."""
    if not path.exists():
        raise _refused(
            name,
            f"there is no file {path}; give the path of a checkpoint's config.json from the "
            "current folder, or a class as in hf:GPT2LMHeadModel",
        )
    data = read_json(path, keeps_nan=True)
    fields: dict[str, Any] = data if isinstance(data, dict) else {}
    for field in _TAKEN_OUT.keys() & fields.keys():
        raise _refused(name, f"{field} in {path}{_TAKEN_OUT[field]}")
    match fields.get("architectures"):
        case [str()]:
            return fields
        case found:
            shown = shorten(found) if "architectures" in fields else "missing"
            raise _refused(
                name,
                f"architectures in {path} is {shown}, expected a list with the name of one class "
                'of transformers, for example ["GPT2LMHeadModel"]',
            )


class _Factory:
    """Builds a class of transformers, named by the user, from the fields of a configuration."""

    def __init__(self, name: str, class_name: str, recorded: Mapping[str, Any]) -> None:
        self.name, self.recorded = name, recorded
        # Errors name a factory as module:name.
        self.__module__, self.__name__ = PREFIX.removesuffix(":"), class_name
        self.__qualname__ = name.removeprefix(PREFIX)
        try:
            library: Any = importlib.import_module("transformers")
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise PipeplanError(
                f"model {name!r} needs the library transformers, which is not installed; "
                'pip install "pipeplan[hf]"'
            ) from None
        self.kind = self._kind_of(class_name, library)
        self.model_class = getattr(library, class_name)
        self.taken = [*inspect.signature(self.model_class.forward).parameters][1:]
        expected = self.model_class.config_class.model_type
        if recorded.get("model_type", expected) != expected:
            raise _refused(
                name,
                f"model_type is {shorten(recorded['model_type'])}, but {class_name} in "
                f"architectures is of {expected!r}; correct one of the two",
            )

    def _kind_of(self, class_name: str, library: Any) -> str:
        """Return what a class is for, by the library's tables."""
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
        kinds: dict[str, str] = {}
        for kind, (table, _) in _KINDS.items():
            for entry in getattr(auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values():
                for known in (entry,) if isinstance(entry, str) else entry:
                    kinds.setdefault(known, kind)
        if class_name in kinds:
            return kinds[class_name]
        if class_name in dir(library):
            raise _refused(
                self.name,
                f"{class_name} is none of the kinds whose batches and losses Pipeplan knows "
                f"({', '.join(_KINDS)}); write a module:factory that wraps it",
            )
        known = near(class_name, sorted(kinds))
        raise _refused(self.name, f"transformers has no class {class_name!r}; {known}")

    def __call__(self, **arguments: Any) -> nn.Module:
        """Build the model with new weights."""
        config_class = self.model_class.config_class
        known, sizes = config_class(), {"sequence_length": arguments.pop("sequence_length", None)}
        if self.kind == _IMAGES and not hasattr(known, "image_size"):
            sizes["image_size"] = arguments.pop("image_size", None)
        for problem in self._problems(known, arguments, sizes):
            raise _refused(self.name, problem)
        config = config_class.from_dict({**self.recorded, **arguments})
        config.return_dict = True
        if hasattr(config, "use_cache"):
            config.use_cache = False
        config._attn_implementation = "sdpa" if self.model_class._supports_sdpa else "eager"
        built: nn.Module = self._one_tensor_class(sizes)(config)
        _send_tokens_to_experts(built)
        wanted, positions = sizes["sequence_length"], _positions(built)
        if wanted is not None and positions is not None and wanted > positions:
            raise _refused(
                self.name,
                f"sequence_length = {wanted} in model_arguments, but its configuration has "
                f"{positions} positions; choose fewer tokens or set max_position_embeddings",
            )
        return built

    def _problems(
        self, known: Any, fields: Mapping[str, Any], sizes: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield sizes that are no sizes, fields that the configuration lacks, and other inputs."""
        for name, value in sizes.items():
            if value is not None and (type(value) is not int or value < 1):
                yield f"{name} = {shorten(value)} in model_arguments, expected a positive integer"
        for field in fields:
            words = f"{field} in model_arguments is "
            if field.startswith("_") or field in _RESERVED:
                yield f"{words}chosen by Pipeplan so that the model can be exported; remove it"
            if not hasattr(known, field):
                others = near(field, [*known.to_dict(), "sequence_length"])
                yield f"{words}no field of {type(known).__name__}; {others}"
        if missing := [entry for entry in _KINDS[self.kind][1] if entry not in self.taken]:
            yield (
                f"{self.model_class.__name__}.forward takes no {' and no '.join(missing)}, which "
                f"Pipeplan gives to a model for {self.kind}; write a module:factory that wraps it"
            )

    def _one_tensor_class(self, sizes: Mapping[str, int | None]) -> Any:
        """Return a subclass with the same name; a wrapper would put a prefix before parameters."""

        def forward(model: Any, target: Tensor | None = None, **inputs: Tensor) -> Tensor:
            """Return the logits, or the model's own loss if it is given the target."""
            if unknown := [entry for entry in inputs if entry not in self.taken]:
                raise _refused(
                    self.name,
                    f"its forward takes no {', '.join(unknown)}; correct the names in [inputs], it "
                    f"takes {', '.join(self.taken)}",
                )
            labels = {} if target is None else {"labels": target}
            if labels and self.kind == "causal language model":
                labels["shift_labels"] = target  # type: ignore[assignment]  # The next token.
            output = self.model_class.forward(model, **inputs, **labels)
            found: Tensor = output.logits if target is None else output.loss
            return found

        def example_batch(model: Any, samples: int) -> dict[str, Tensor]:
            """Return random inputs by the names of forward's arguments, and a ``target``."""
            config = model.config
            if self.kind == _IMAGES:
                found = getattr(config, "image_size", None)
                size = sizes.get("image_size") or found or _DEFAULT_PIXELS
                pixels = size if isinstance(size, list | tuple) else (size, size)
                channels = getattr(config, "num_channels", 3)
                return {
                    "pixel_values": torch.randn(samples, channels, *pixels),
                    "target": torch.randint(config.num_labels, (samples,)),
                }
            length = sizes["sequence_length"]
            if length is None:
                length = min(_positions(model) or _DEFAULT_TOKENS, _MOST_TOKENS)
            names = (*_KINDS[self.kind][1], "target")
            return {entry: torch.randint(config.vocab_size, (samples, length)) for entry in names}

        members = {
            "__module__": self.model_class.__module__,
            "__doc__": self.model_class.__doc__,
            "forward": forward,
            "example_batch": example_batch,
        }
        return type(self.model_class.__name__, (self.model_class,), members)


def _positions(model: Any) -> int | None:
    """Return the number of positions of the model; None if its configuration has no such number."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is None:
        return None
    # Positions of RoBERTa and its kin begin after that of padding.
    spare = [
        module.padding_idx + 1
        for path, module in model.named_modules()
        if path.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return int(longest) - max(spare, default=0)


# --- experts --------------------------------------------------------------------------------------


def _send_tokens_to_experts(model: Any) -> None:
    """Let the experts of a model compute the tokens that chose them, with static shapes.

    Experts with biases, or with a norm behind them, keep the library's own sorting of tokens.
    """
    if not model._can_set_experts_implementation():
        return
    has_more = any(
        getattr(module, "has_bias", False) or getattr(module, "has_post_expert_norm", False)
        for module in model.modules()
    )
    if not has_more:
        library = importlib.import_module("transformers.integrations.moe")
        library.ALL_EXPERTS_FUNCTIONS.register("pipeplan", _experts)
    model.set_experts_implementation("grouped_mm" if has_more else "pipeplan")


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute a layer's experts, as the library calls it.

    Args:
        module: with the experts' matrices.
        hidden: tokens, [N, width].
        chosen: experts of each token, int64 [N, k].
        weights: of these, [N, k].
    """

    def product(rows: Tensor, matrices: Tensor) -> Tensor:
        is_inner_first = getattr(module, "is_transposed", False)
        matrices = matrices if is_inner_first else matrices.transpose(-2, -1)
        found: Tensor = grouped_product(rows, matrices, offsets)
        return found

    has_gate = getattr(module, "has_gate", True)
    first = module.gate_up_proj if has_gate else module.up_proj
    offsets = expert_offsets(chosen, module.num_experts)
    made = product(dispatch_to_experts(hidden, chosen).to(first.dtype), first)
    made = module._apply_gate(made) if has_gate else module.act_fn(made)
    combined: Tensor = combine_experts(product(made, module.down_proj), chosen, weights)
    return combined.to(hidden.dtype)
