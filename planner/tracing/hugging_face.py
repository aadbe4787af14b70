"""Models of Hugging Face ``transformers`` by name: ``hf:ClassName`` and ``hf:CONFIG.json``.

Only classes of the installed library are built, with new weights: no code of a checkpoint runs and
nothing is downloaded. The model stays an instance of its class, so that its parameters keep their
names; its forward takes tensors by name and returns one tensor. Experts compute by the operations
that Pipeplan divides over groups.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.errors import PipeplanError, shorten
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


class _Model(NamedTuple):
    """A class of transformers under the name that the user gave.

    Attributes:
        name: with the prefix.
        model_class: the class.
        kind: what it is for.
        recorded: fields of a configuration file.
    """

    name: str
    model_class: Any
    kind: str
    recorded: Mapping[str, Any]


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
    class_name = recorded["architectures"][0] if recorded else wanted
    library = _transformers(name)
    kind = _kind_of(name, class_name, library)
    model_class = getattr(library, class_name)
    expected = model_class.config_class.model_type
    if recorded.get("model_type", expected) != expected:
        raise _refused(
            name,
            f"model_type is {shorten(recorded['model_type'])}, but {class_name} in architectures "
            f"is of {expected!r}; correct one of the two",
        )
    model = _Model(name, model_class, kind, recorded)

    def factory(**arguments: Any) -> nn.Module:
        return _build(model, arguments)

    # Errors name a factory as module:name.
    factory.__module__, factory.__qualname__ = PREFIX.removesuffix(":"), wanted
    factory.__name__ = class_name
    return factory


def is_configuration_file(name: str) -> bool:
    """Return whether a model is named by the path of a configuration, ``hf:CONFIG.json``."""
    return name.startswith(PREFIX) and name.endswith(".json")


def _refused(name: str, words: str) -> PipeplanError:
    return PipeplanError(f"model {name!r}: {words}")


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise PipeplanError(
            f"model {name!r} needs the library transformers, which is not installed; "
            'pip install "pipeplan[hf]"'
        ) from None


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


def _kind_of(name: str, class_name: str, library: Any) -> str:
    """Return the task of a class.

    Raises:
        PipeplanError: if transformers has no such class, or it is of no supported kind.
    """
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    kinds: dict[str, str] = {}
    for kind, (table, _) in _KINDS.items():
        for entry in getattr(auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values():
            names = (entry,) if isinstance(entry, str) else entry
            kinds = dict.fromkeys(names, kind) | kinds
    if class_name in kinds:
        return kinds[class_name]
    if class_name in dir(library):
        raise _refused(
            name,
            f"{class_name} is none of the kinds whose batches and losses Pipeplan knows "
            f"({', '.join(_KINDS)}); write a module:factory that wraps it",
        )
    hint = _meant(class_name, kinds, 4) or ", for example GPT2LMHeadModel"
    raise _refused(name, f"transformers has no class {class_name!r}{hint}")


def _meant(name: str, known: Iterable[str], most: int) -> str:
    close = get_close_matches(name, [*known], n=most)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _build(model: _Model, arguments: Mapping[str, Any]) -> nn.Module:
    fields, config_class = dict(arguments), model.model_class.config_class
    known = config_class()
    sizes = {"sequence_length": fields.pop("sequence_length", None)}
    if model.kind == _IMAGES and not hasattr(known, "image_size"):
        sizes["image_size"] = fields.pop("image_size", None)
    for problem in _problems(model, known, fields, sizes):
        raise _refused(model.name, problem)
    config = config_class.from_dict({**model.recorded, **fields})
    config.return_dict = True
    if hasattr(config, "use_cache"):
        config.use_cache = False
    config._attn_implementation = "sdpa" if model.model_class._supports_sdpa else "eager"
    built: nn.Module = _one_tensor_class(model, sizes)(config)
    _send_tokens_to_experts(built)
    wanted, positions = sizes["sequence_length"], _positions(built)
    if wanted is not None and positions is not None and wanted > positions:
        raise _refused(
            model.name,
            f"sequence_length = {wanted} in model_arguments, but its configuration has {positions} "
            "positions; choose fewer tokens or set max_position_embeddings",
        )
    return built


def _problems(
    model: _Model, known: Any, fields: Mapping[str, Any], sizes: Mapping[str, Any]
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
            hint = _meant(field, [*known.to_dict(), "sequence_length"], 3) or "; remove it"
            yield f"{words}no field of {type(known).__name__}{hint}"
    taken = inspect.signature(model.model_class.forward).parameters
    if missing := [entry for entry in _KINDS[model.kind][1] if entry not in taken]:
        yield (
            f"{model.model_class.__name__}.forward takes no {' and no '.join(missing)}, which "
            f"Pipeplan gives to a model for {model.kind}; write a module:factory that wraps it"
        )


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


def _one_tensor_class(model: _Model, sizes: Mapping[str, int | None]) -> Any:
    """Return a subclass with the same name; a wrapper would put a prefix before all parameters."""
    model_class, kind = model.model_class, model.kind
    taken = [*inspect.signature(model_class.forward).parameters][1:]

    def forward(self: Any, target: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Return the logits, or the model's own loss if it is given the target."""
        if unknown := [entry for entry in inputs if entry not in taken]:
            raise _refused(
                model.name,
                f"its forward takes no {', '.join(unknown)}; correct the names in [inputs], it "
                f"takes {', '.join(taken)}",
            )
        labels = {} if target is None else {"labels": target}
        if labels and kind == "causal language model":
            labels["shift_labels"] = target  # type: ignore[assignment]  # It is the next token.
        output = model_class.forward(self, **inputs, **labels)
        found: Tensor = output.logits if target is None else output.loss
        return found

    def example_batch(self: Any, samples: int) -> dict[str, Tensor]:
        """Return random inputs by the names of forward's arguments, and a ``target``."""
        if kind == _IMAGES:
            return _images(self.config, samples, sizes.get("image_size"))
        length = sizes["sequence_length"]
        if length is None:
            length = min(_positions(self) or _DEFAULT_TOKENS, _MOST_TOKENS)
        names = (*_KINDS[kind][1], "target")
        return {entry: torch.randint(self.config.vocab_size, (samples, length)) for entry in names}

    members = {
        "__module__": model_class.__module__,
        "__doc__": model_class.__doc__,
        "forward": forward,
        "example_batch": example_batch,
    }
    return type(model_class.__name__, (model_class,), members)


def _images(config: Any, samples: int, given: int | None) -> dict[str, Tensor]:
    size = given or getattr(config, "image_size", None) or _DEFAULT_PIXELS
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {
        "pixel_values": torch.randn(samples, getattr(config, "num_channels", 3), height, width),
        "target": torch.randint(config.num_labels, (samples,)),
    }


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
