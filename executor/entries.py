"""What the user's data must look like: entries by name, each of one dtype and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from planner.errors import PipeplanError
from planner.tracing.form import Form


def fitted_entries(
    found: object, forms: Mapping[str, Form], place: str, what: str
) -> dict[str, Tensor]:
    """Entries as tensors on the CPU; float32 ones are rounded where a low precision is wanted.

    Args:
        found: what the user's code gave: a mapping with exactly these names, or a tuple or list
            in their order.
        forms: what is expected.
        place: whose it is, for messages.
        what: the expected forms are those of, for messages.

    Raises:
        PipeplanError: naming every entry that does not fit.
    """
    entries = _by_name(found, list(forms), place)
    fitted = {
        name: _fitted(entries[name], form, f"{place}: entry {name!r}", what)
        for name, form in forms.items()
    }
    problems = [text for text in fitted.values() if isinstance(text, str)]
    if problems:
        raise PipeplanError(problems)
    return {name: tensor for name, tensor in fitted.items() if isinstance(tensor, Tensor)}


def _by_name(found: object, names: Sequence[str], place: str) -> Mapping[str, object]:
    if isinstance(found, tuple | list) and len(found) == len(names):
        return dict(zip(names, found, strict=True))
    if isinstance(found, Mapping) and set(found) == set(names):
        return found
    told = f"a {type(found).__name__}"
    if isinstance(found, Mapping):
        told = f"entries {', '.join(map(str, found)) or 'none'}"
    elif isinstance(found, tuple | list):
        told = f"a {type(found).__name__} of {len(found)}"
    raise PipeplanError(
        f"{place} returned {told}; expected the entries {', '.join(names)}, by name or as a "
        "tuple in this order"
    )


def _fitted(value: object, form: Form, where: str, what: str) -> Tensor | str:
    """The entry as a tensor that fits, or what is wrong with it."""
    if not isinstance(value, Tensor | np.ndarray | np.generic | int | float):
        return f"{where} is a {type(value).__name__}; expected a tensor, an array or a number"
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{where} cannot be made a tensor: {error}"
    rounds = tensor.dtype == torch.float32 and form.dtype in (torch.float16, torch.bfloat16)
    has_shape = tuple(tensor.shape) == tuple(form.shape)
    if not has_shape or (tensor.dtype != form.dtype and not rounds):
        return f"{where} is {Form.of(tensor)}; expected {form}, {what} that the plan was made for"
    return tensor.detach().to("cpu", form.dtype)
