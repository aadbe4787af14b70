"""Export of a training step by torch.export, with parameters under their original names."""

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.errors import PipeplanError
from planner.job import LOSSES, Job
from planner.tracing.eager import attributes_restored, autocast_on_any_device, observe
from planner.tracing.factory import Loss, TrainingStep
from planner.tracing.functions import functions_kept
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.sharing import ExportedStep as ExportedStep
from planner.tracing.sharing import attribute_of, returns_what_it_wrote, written_by
from planner.tracing.torch_private import HigherOrderOperator
from planner.tracing.user_code import FAILURES, is_exports_own, one_line


def export_step(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    job: Job,
    own_loss: Loss | None = None,
    *,
    training: bool = True,
) -> ExportedStep:
    """Export the model together with its loss.

    Args:
        model: on any device; on ``meta`` nothing is allocated. Call this with the device as torch's
            default, for the tensors that forward makes.
        batch: one microbatch on the same device.
        job: the job, for its loss.
        own_loss: the function that ``job.loss`` names, if it is the user's own ``module:function``.
        training: whether in training mode, in which the model is left; else in evaluation mode.

    Raises:
        PipeplanError: with torch's reason if the model cannot be exported, or if its output does
            not fit the loss.
    """
    step = TrainingStep(model.train(training), job.loss, own_loss)
    _check_arguments(model, [name for name in batch if step.takes(name)])
    seen = None
    try:
        with _quiet_torch(), attributes_restored(step):
            if not torch.is_autocast_enabled("cpu"):  # Else it was compared without before.
                seen = observe(step, batch)
            with functions_kept(), autocast_on_any_device():
                # Entries that are one tensor would be one input: where an example has the same
                # tokens as input and target, the model would read its target.
                entries = {name: value.clone() for name, value in batch.items()}
                exported = torch.export.export(step, (), entries, strict=False)
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
        if node.op == "call_function" and node.kwargs.get("generator") is not None:
            raise PipeplanError(
                f"{type(model).__name__}.forward draws with a torch.Generator of its own "
                f"({node.target}), of which every rank would have a copy; draw without generator="
            )
    _inline_regions(module)
    _count_in_the_buffer(module.graph)
    values = module.graph.output_node().all_input_nodes
    if len(values) != 1 or values[0].meta["val"].numel() != 1:
        raise PipeplanError(
            f"loss = {job.loss!r} of {type(model).__name__} is not a single number; "
            f"let {'the model' if job.loss in LOSSES else 'it'} return its loss as a scalar tensor"
        )
    made = ExportedStep(module, _canonical_names(module), seen.notes if seen else ())
    if seen:
        _require_gradients(made, seen.trained)
    return made


# --- before the export ----------------------------------------------------------------------------


def _check_arguments(model: nn.Module, names: Sequence[str]) -> None:
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


_REMEDIES = {
    ("DynamicOutputShape",): "the shape of a value depends on the data, as where tokens are "
    "selected for an expert; send tokens by the operations of planner.tracing.expert_operations "
    "(docs/experts.md), or compute all rows and multiply those that do not count by zero",
    ("DataDependent", "data-dependent"): "Python reads a value of a tensor there (item(), float() "
    "or a condition), which is not known before training; choose with torch.where, or multiply by "
    "the tensor itself",
    ("",): "data-dependent control flow and unsupported Python must be removed from forward",
}
"""What to do where torch.export says one of these words."""


def _failed_export(model: nn.Module, error: BaseException) -> str:
    """Say why a forward could not be exported, and what a user can change about it."""
    name, said = f"{type(model).__module__}:{type(model).__qualname__}", one_line(error)
    if not is_exports_own(error):
        return f"{name}.forward failed while torch.export traced it: {said}"
    remedy = next(x for words, x in _REMEDIES.items() if any(word in said for word in words))
    return f"torch.export cannot trace {name}: {said}; {remedy}"


# --- behind the export ----------------------------------------------------------------------------


def _count_in_the_buffer(graph: fx.Graph) -> None:
    """Let every ``counter.add_(1)`` name the buffer instead of the previous result.

    Otherwise a module that is called twice would pass its counter from layer to layer.
    """
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor):
        if isinstance(node.args[0], fx.Node):
            buffer = root.get(node.args[0], node.args[0])
            if buffer.op == "get_attr" and isinstance(node.args[1], int):
                node.args = (buffer, *node.args[1:])
                root[node] = buffer


def _canonical_names(module: fx.GraphModule) -> dict[str, str]:
    """Return the model's own name of each parameter and buffer; tied ones share the first."""
    first: dict[int, str] = {}
    rows = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(id(x), name.removeprefix("model.")) for name, x in rows}


def _require_gradients(made: ExportedStep, expected: Set[str]) -> None:
    """Refuse a step that trains other parameters than eager torch.

    Raises:
        PipeplanError: naming some of them.
    """
    found = {made.names.get(str(n.target)) for n in nodes_with_gradient(made) if n.op == "get_attr"}
    lost, new = sorted(expected - found), sorted(name for name in found - expected if name)
    words = [f"loses the gradients of {', '.join(lost[:5])}"] if lost else []
    words += [f"gives gradients to {', '.join(new[:5])}"] if new else []
    if words:
        raise PipeplanError(
            f"the exported step {' and '.join(words)}, unlike eager torch; write this part of "
            "forward as plain operations, or as an autograd Function"
        )


# --- regions --------------------------------------------------------------------------------------

_GRADIENTS, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
"""Calls of a graph, given behind their settings: what export makes of parts under
``torch.no_grad()`` or a disabled autocast."""


def _inline_regions(module: fx.GraphModule) -> None:
    """Put the operations of regions into the graph, so that they have layers.

    Operands of a region without gradients are detached where they are used. A region with
    gradients inside one without, and autocast that is in use, stay as they are.
    """
    for node in list(module.graph.nodes):
        name = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
        place = {_GRADIENTS: 1, _AUTOCAST: 4}.get(name)
        if place is None:
            continue
        inner = attribute_of(module, str(node.args[place].target))
        assert isinstance(inner, fx.GraphModule)
        _inline_regions(inner)
        # Autocast may be on in the region, or around the step and so off in it alone.
        casts = name == _AUTOCAST and (node.args[2] or torch.is_autocast_enabled("cpu"))
        is_off = node.args[0] is False if name == _GRADIENTS else not casts
        kinds = {row.op for row in inner.graph.nodes} - {"placeholder", "call_function", "output"}
        results: Any = inner.graph.output_node().args[0]
        if is_off and not kinds and all(isinstance(value, fx.Node) for value in results):
            _inline(module, node, inner, place, detaches=name == _GRADIENTS)
    module.graph.lint()
    module.recompile()


def _inline(
    module: fx.GraphModule, region: fx.Node, inner: fx.GraphModule, place: int, *, detaches: bool
) -> None:
    graph = module.graph
    held, *taken = region.args[place:]
    entrances = inner.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(entrances, taken, strict=True))
    with graph.inserting_before(region):
        for node in (row for row in inner.graph.nodes if row.op == "call_function"):
            used = {operand: copies[operand] for operand in node.all_input_nodes}
            for operand, value in used.items() if detaches else ():
                if operand.op == "placeholder" and _may_take_gradient(module, value):
                    made = graph.call_function(torch.ops.aten.detach.default, (value,))
                    made.meta = {**node.meta, "val": value.meta["val"].detach()}
                    used[operand] = made
            copies[node] = graph.node_copy(node, used.__getitem__)
    results: Any = inner.graph.output_node().args[0]
    for part in list(region.users):  # Its results are taken apart, one by one.
        result = results[part.args[1]]
        # A write in place returns the value it changed, which keeps its own gradient.
        while result.op == "call_function" and returns_what_it_wrote(result):
            result = written_by(result)[0]
        part.replace_all_uses_with(copies[result])
        graph.erase_node(part)
    graph.erase_node(region)
    assert isinstance(held, fx.Node)
    if not held.users:
        graph.erase_node(held)


def _may_take_gradient(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        value = attribute_of(module, str(node.target))
        return isinstance(value, nn.Parameter) and value.requires_grad
    value = node.meta.get("val")
    is_number = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return node.op == "call_function" and is_number
