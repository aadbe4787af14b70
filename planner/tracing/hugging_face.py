"""Models of Hugging Face ``transformers`` by name: ``hf:ClassName`` and ``hf:CONFIG.json``.

Only classes of the installed library are built, with new weights: no code of a checkpoint runs and
nothing is downloaded. The model stays an instance of its class, so that its parameters keep their
names; its forward takes tensors by name and returns one tensor.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import PipeplanError, shorten
from planner.tracing.hugging_face_experts import send_tokens_to_experts

PREFIX = "hf:"
SEQUENCE_LENGTH = "sequence_length"
IMAGE_SIZE = "image_size"
_CONFIGURATION = "config.json"
_MOST_TOKENS = 2048  # Of a default; longer ones by choice.
_DEFAULT_TOKENS = 512
_DEFAULT_PIXELS = 224

# What a model is for, by the library's own tables; the first that names the class counts.
_KINDS = {
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "causal language model": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked language model": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
_INPUTS = {
    "sequence to sequence": ("input_ids", "decoder_input_ids"),
    "causal language model": ("input_ids",),
    "masked language model": ("input_ids",),
    "image classification": ("pixel_values",),
}
# These may fetch code or weights, or choose what cannot be exported.
_RESERVED = frozenset(
    "attn_implementation experts_implementation auto_map quantization_config use_cache "
    "return_dict use_kernels".split()
)


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
    if (Path(wanted) / _CONFIGURATION).is_file():
        raise PipeplanError(
            f"model {name!r} is a folder; name its configuration: {name.rstrip('/')}/"
            f"{_CONFIGURATION}"
        )
    recorded, class_name = {}, wanted
    if is_configuration_file(name):
        recorded = _configuration_file(name, Path(wanted))
        class_name = _architecture(name, recorded)
    library = _transformers(name)
    kind = _kind_of(name, class_name)
    model_class = getattr(library, class_name)
    _require_model_type(name, recorded, model_class)

    def factory(**arguments: Any) -> nn.Module:
        return _build(name, model_class, kind, recorded, arguments)

    # Errors name a factory as module:name.
    factory.__module__, factory.__qualname__ = PREFIX.removesuffix(":"), wanted
    factory.__name__ = class_name
    return factory


def is_configuration_file(name: str) -> bool:
    """Return whether a model is named by the path of a configuration, ``hf:CONFIG.json``."""
    return name.startswith(PREFIX) and name.endswith(".json")


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


def _configuration_file(name: str, path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PipeplanError(
            f"model {name!r}: there is no file {path}; give the path of a checkpoint's "
            "config.json from the current folder, or a class as in hf:GPT2LMHeadModel"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PipeplanError(f"model {name!r}: {path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise PipeplanError(
            f"model {name!r}: {path} is not JSON: {error}; give a checkpoint's config.json"
        ) from None
    if not isinstance(data, dict):
        raise PipeplanError(
            f"model {name!r}: {path} holds a {type(data).__name__}, expected an object with "
            "architectures and the configuration's fields"
        )
    if "auto_map" in data:
        raise PipeplanError(
            f"model {name!r}: auto_map in {path} names code of the checkpoint's author, which "
            "Pipeplan does not run; remove auto_map if transformers has the class in "
            "architectures itself, else give your own module:factory"
        )
    if "quantization_config" in data:
        raise PipeplanError(
            f"model {name!r}: quantization_config in {path}: only weights that are not quantised "
            "can be trained; remove it and choose a precision in the job file"
        )
    return data


def _architecture(name: str, recorded: Mapping[str, Any]) -> str:
    found = recorded.get("architectures")
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str):
        return found[0]
    shown = shorten(found) if "architectures" in recorded else "missing"
    raise PipeplanError(
        f"model {name!r}: architectures is {shown}, expected a list with the name of one class "
        'of transformers, for example ["GPT2LMHeadModel"]'
    )


def _require_model_type(name: str, recorded: Mapping[str, Any], model_class: Any) -> None:
    expected = model_class.config_class.model_type
    found = recorded.get("model_type", expected)
    if found != expected:
        raise PipeplanError(
            f"model {name!r}: model_type is {shorten(found)}, but {model_class.__name__} in "
            f"architectures is of {expected!r}; correct one of the two"
        )


def _kind_of(name: str, class_name: str) -> str:
    """Return the task of a class.

    Raises:
        PipeplanError: if transformers has no such class, or it is of no supported kind.
    """
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    kinds: dict[str, str] = {}
    for kind, table in _KINDS.items():
        for entry in getattr(auto, table).values():
            for known in (entry,) if isinstance(entry, str) else entry:
                kinds.setdefault(known, kind)
    if class_name in kinds:
        return kinds[class_name]
    if class_name in dir(_transformers(name)):
        raise PipeplanError(
            f"model {name!r}: {class_name} is none of the kinds whose batches and losses Pipeplan "
            f"knows ({', '.join(_KINDS)}); write a module:factory that wraps it"
        )
    close = get_close_matches(class_name, kinds, n=4)
    hint = f"; did you mean {' or '.join(close)}?" if close else ", for example GPT2LMHeadModel"
    raise PipeplanError(f"model {name!r}: transformers has no class {class_name!r}{hint}")


def _build(
    name: str,
    model_class: Any,
    kind: str,
    recorded: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> nn.Module:
    fields = dict(arguments)
    sizes = {SEQUENCE_LENGTH: _positive(name, SEQUENCE_LENGTH, fields)}
    known = model_class.config_class()
    if kind == "image classification" and not hasattr(known, IMAGE_SIZE):
        sizes[IMAGE_SIZE] = _positive(name, IMAGE_SIZE, fields)
    _require_fields(name, known, fields)
    config = model_class.config_class.from_dict({**recorded, **fields})
    config.return_dict = True
    if hasattr(config, "use_cache"):
        config.use_cache = False
    config._attn_implementation = "sdpa" if model_class._supports_sdpa else "eager"
    _require_inputs(name, model_class, kind)
    model: nn.Module = _one_tensor_class(name, model_class, kind, sizes)(config)
    send_tokens_to_experts(model)
    _require_positions(name, model, sizes[SEQUENCE_LENGTH])
    return model


def _positive(name: str, field: str, fields: dict[str, Any]) -> int | None:
    value = fields.pop(field, None)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise PipeplanError(
            f"model {name!r}: {field} = {shorten(value)} in model_arguments, expected a positive "
            "integer"
        )
    return value


def _require_fields(name: str, known: Any, fields: Mapping[str, Any]) -> None:
    for field in fields:
        if field.startswith("_") or field in _RESERVED:
            raise PipeplanError(
                f"model {name!r}: {field} in model_arguments is chosen by Pipeplan so that the "
                "model can be exported; remove it"
            )
        if not hasattr(known, field):
            close = get_close_matches(field, [*known.to_dict(), SEQUENCE_LENGTH], n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else "; remove it"
            raise PipeplanError(
                f"model {name!r}: {field} in model_arguments is no field of "
                f"{type(known).__name__}{hint}"
            )


def _require_inputs(name: str, model_class: Any, kind: str) -> None:
    taken = inspect.signature(model_class.forward).parameters
    missing = [entry for entry in _INPUTS[kind] if entry not in taken]
    if missing:
        raise PipeplanError(
            f"model {name!r}: {model_class.__name__}.forward takes no {' and no '.join(missing)}, "
            f"which Pipeplan gives to a model for {kind}; write a module:factory that wraps it"
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


def _require_positions(name: str, model: nn.Module, wanted: int | None) -> None:
    positions = _positions(model)
    if wanted is not None and positions is not None and wanted > positions:
        raise PipeplanError(
            f"model {name!r}: sequence_length = {wanted} in model_arguments, but its configuration "
            f"has {positions} positions; choose fewer tokens or set max_position_embeddings"
        )


def _one_tensor_class(
    name: str, model_class: Any, kind: str, sizes: Mapping[str, int | None]
) -> Any:
    """Return a subclass with the same name; a wrapper would put a prefix before all parameters."""
    taken = inspect.signature(model_class.forward).parameters

    def forward(self: Any, target: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Return the logits, or the model's own loss if it is given the target."""
        _require_taken(name, inputs, taken)
        output = model_class.forward(self, **inputs, **_labels(kind, target))
        found: Tensor = output.logits if target is None else output.loss
        return found

    def example_batch(self: Any, samples: int) -> dict[str, Tensor]:
        """Return random inputs by the names of forward's arguments, and a ``target``."""
        if kind == "image classification":
            return _images(self.config, samples, sizes.get(IMAGE_SIZE))
        length = sizes[SEQUENCE_LENGTH]
        if length is None:
            length = min(_positions(self) or _DEFAULT_TOKENS, _MOST_TOKENS)
        names = (*_INPUTS[kind], "target")
        return {entry: torch.randint(self.config.vocab_size, (samples, length)) for entry in names}

    members = {
        "__module__": model_class.__module__,
        "__doc__": model_class.__doc__,
        "forward": forward,
        "example_batch": example_batch,
    }
    return type(model_class.__name__, (model_class,), members)


def _require_taken(name: str, inputs: Iterable[str], taken: Iterable[str]) -> None:
    known = [entry for entry in taken if entry != "self"]
    unknown = [entry for entry in inputs if entry not in known]
    if unknown:
        raise PipeplanError(
            f"model {name!r}: its forward takes no {', '.join(unknown)}; correct the names in "
            f"[inputs], it takes {', '.join(known)}"
        )


def _labels(kind: str, target: Tensor | None) -> dict[str, Tensor]:
    """Return the target under the names that a model's own loss expects."""
    if target is None:
        return {}
    if kind == "causal language model":
        return {"labels": target, "shift_labels": target}  # It is the next token already.
    return {"labels": target}


def _images(config: Any, samples: int, given: int | None) -> dict[str, Tensor]:
    size = given or getattr(config, IMAGE_SIZE, None) or _DEFAULT_PIXELS
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return {
        "pixel_values": torch.randn(samples, channels, height, width),
        "target": torch.randint(config.num_labels, (samples,)),
    }
