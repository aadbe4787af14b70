"""Models that start from weights of a local file, in place of new ones.

A factory may load weights as it builds: the executor calls it on every rank, which keeps the values
of its own stages alone. Planning calls it on the meta device, where there is nothing to fill and
only names and shapes are compared.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from models.gpt import gpt_tiny
from planner.errors import PipeplanError
from planner.tracing.hugging_face import factory_of


def hugging_face(folder: str, prefix: str = "", **arguments: object) -> nn.Module:
    """A model of Hugging Face transformers from a folder that ``save_pretrained`` wrote.

    Args:
        folder: with ``config.json`` and safetensors files; nothing is downloaded.
        prefix: put before the names in the files, such as ``transformer.`` where a model without
            its head was saved.
        **arguments: fields of the configuration, and ``sequence_length``.
    """
    model = factory_of(f"hf:{folder}/config.json")(**arguments)
    load_weights(model, Path(folder), prefix)
    return model


def my_gpt(file: str, **arguments: int) -> nn.Module:
    """A model of one's own from a safetensors file, or from what ``torch.save`` wrote."""
    model = gpt_tiny(**arguments)
    load_weights(model, Path(file))
    return model


def load_weights(model: nn.Module, source: Path, prefix: str = "") -> None:
    """Fill the parameters and buffers of a model, tensor by tensor.

    Args:
        model: on the CPU, or on the meta device, where only names and shapes are compared.
        source: a safetensors file, a folder of them, or a ``.pt`` file with a state dict.
        prefix: put before the names in the files.

    Raises:
        PipeplanError: listing the names that only the model or only the file has, and the tensors
            of another shape; nothing is filled then.
    """
    own = model.state_dict(keep_vars=True)
    shapes = {prefix + name: shape for name, shape in _shapes(source).items()}
    _require_same(model, own, shapes, source)
    with torch.no_grad():
        for name, tensor in _tensors(source) if not _is_meta(own) else ():
            if prefix + name in own:
                own[prefix + name].copy_(tensor)


def _is_meta(own: Mapping[str, Tensor]) -> bool:
    return any(tensor.is_meta for tensor in own.values())


def _require_same(
    model: nn.Module, own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], source: Path
) -> None:
    # Files hold one name of tied tensors.
    there = {id(own[name]) for name in shapes if name in own}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    different = [n for n in shapes if n in own and shapes[n] != tuple(own[n].shape)]
    found = {
        "names that only the model has": [n for n, x in own.items() if id(x) not in there],
        "names that only the file has": [
            n for n in shapes if n not in own and not any(re.search(row, n) for row in ignored)
        ],
        "other shapes": [f"{n} {shapes[n]}, not {tuple(own[n].shape)}" for n in different],
    }
    problems = [
        f"{source}: {len(rows)} {what}: {', '.join(rows[:20])}{', …' if len(rows) > 20 else ''}"
        for what, rows in found.items()
        if rows
    ]
    if problems:
        raise PipeplanError([f"{row}; give the model's own weights" for row in problems])


def _files(source: Path) -> list[Path]:
    """Return the safetensors files of a source, by its index if it has one."""
    if source.is_file():
        return [source]
    index = source / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        return sorted({source / Path(name).name for name in names})
    found = sorted(source.glob("*.safetensors"))
    if not found:
        raise PipeplanError(f"{source}: no safetensors file; name a file or a folder of them")
    return found


def _shapes(source: Path) -> dict[str, tuple[int, ...]]:
    if source.suffix in (".pt", ".pth", ".bin"):
        return {name: tuple(tensor.shape) for name, tensor in _tensors(source)}
    found: dict[str, tuple[int, ...]] = {}
    for path in _files(source):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                found[name] = tuple(file.get_slice(name).get_shape())
    return found


def _tensors(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors one by one; no code of a file runs."""
    if source.suffix in (".pt", ".pth", ".bin"):
        yield from torch.load(source, map_location="cpu", weights_only=True, mmap=True).items()
        return
    for path in _files(source):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)
