"""Export of a training step by torch.export, with parameters under their original names."""

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from planner.errors import PipeplanError
from planner.job import LOSSES, TARGET, Job
from planner.tracing.factory import Loss, TrainingStep
from planner.tracing.no_grad import inline_no_grad
from planner.tracing.sharing import attribute_of
from planner.tracing.user_code import FAILURES, is_exports_own, one_line

_PREFIX = "model."


@dataclass(frozen=True)
class ExportedStep:
    """The graph of one forward with its loss.

    Attributes:
        module: an ``fx.GraphModule``; ``get_attr`` nodes hold parameters and buffers.
        names: the model's own name (FQN) of each ``get_attr`` target; tied ones share a name.
    """

    module: fx.GraphModule
    names: Mapping[str, str]

    @property
    def graph(self) -> fx.Graph:
        """The nodes in executable order."""
        return self.module.graph

    def attribute(self, node: fx.Node) -> object:
        """Return the parameter, buffer or constant of a ``get_attr`` node."""
        return attribute_of(self.module, str(node.target))


def export_step(
    model: nn.Module, batch: Mapping[str, Tensor], job: Job, own_loss: Loss | None = None
) -> ExportedStep:
    """Export the model in training mode together with its loss.

    Args:
        model: on any device; on ``meta`` nothing is allocated. Call this with the device as torch's
            default, for the tensors that forward makes.
        batch: one microbatch on the same device.
        job: the job, for its loss.
        own_loss: the function that ``job.loss`` names, if it is the user's own ``module:function``.

    Raises:
        PipeplanError: with torch's reason if the model cannot be exported, or if its output does
            not fit the loss.
    """
    step = TrainingStep(model.train(), job.loss, own_loss)
    _check_arguments(model, batch)
    try:
        with _quiet_torch():
            exported = torch.export.export(step, (), _apart(batch), strict=False)
    except PipeplanError:
        raise
    except FAILURES as error:
        raise PipeplanError(_failed_export(model, error)) from error
    module = exported.module()
    assert isinstance(module, fx.GraphModule)
    for node in list(module.graph.nodes):
        # Shape guards of the export: a plan fixes the shapes, and a stage sees other inputs.
        if node.op == "call_module" and node.name.startswith("_guards"):
            module.graph.erase_node(node)
    inline_no_grad(module)
    _count_in_the_buffer(module.graph)
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    if len(output.all_input_nodes) != 1 or output.all_input_nodes[0].meta["val"].numel() != 1:
        raise PipeplanError(
            f"loss = {job.loss!r} of {type(model).__name__} is not a single number; "
            f"let {'the model' if job.loss in LOSSES else 'it'} return its loss as a scalar tensor"
        )
    return ExportedStep(module, _canonical_names(module))


def _apart(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with a separate tensor for every entry.

    Export treats entries that are one tensor as one input: a model whose example has the same
    tokens as input and target would read its target.
    """
    found: dict[str, Tensor] = {}
    for name, value in batch.items():
        is_taken = any(value is other for other in found.values())
        found[name] = value.clone() if is_taken else value
    return found


def _count_in_the_buffer(graph: fx.Graph) -> None:
    """Let every ``counter.add_(1)`` name the buffer instead of the previous result.

    Otherwise a module that is called twice would pass its counter from layer to layer.
    """
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten.add_.Tensor and isinstance(node.args[0], fx.Node):
            buffer = root.get(node.args[0], node.args[0])
            if buffer.op == "get_attr" and isinstance(node.args[1], int):
                node.args = (buffer, *node.args[1:])
                root[node] = buffer


def _failed_export(model: nn.Module, error: BaseException) -> str:
    name = f"{type(model).__module__}:{type(model).__qualname__}"
    if is_exports_own(error):
        return (
            f"torch.export cannot trace {name}: {one_line(error)}; data-dependent control flow and "
            "unsupported Python must be removed from forward"
        )
    return f"{name}.forward failed while torch.export traced it: {one_line(error)}"


def _check_arguments(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    names = [name for name in batch if name != TARGET]
    try:
        inspect.signature(model.forward).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise PipeplanError(
            f"{type(model).__name__}.forward does not take the batch's inputs "
            f"({', '.join(names) or 'none'}): {error}; correct the names in [inputs] or in "
            "example_batch"
        ) from None


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep torch from logging whole graphs when an export fails; its exception has the reason.

    Output of the model itself goes to stderr, since stdout may be JSON for another program.
    """
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed), warnings.catch_warnings():
            # An LSTM lists its own parameters there; they are exported as parameters all the same.
            warnings.filterwarnings("ignore", message=r".*\._flat_weights\[")
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _canonical_names(module: fx.GraphModule) -> dict[str, str]:
    first: dict[int, str] = {}
    names = {}
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        own = name.removeprefix(_PREFIX)
        names[name] = first.setdefault(id(tensor), own)
    return names
