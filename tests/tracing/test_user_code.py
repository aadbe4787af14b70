"""Models of the current folder: found by name, described by the job, or refused in one line.

Whatever the user's code raises is told with the user's own line.
"""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PipeplanError
from planner.job import Job
from planner.tracing.trace import trace

MODULE = """
    import sys

    import torch
    from torch import nn

    class Plain(nn.Module):
        def __init__(self, width=4):
            super().__init__()
            self.up = nn.Linear(4, width)
            self.down = nn.Linear(width, 4)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    class Net(Plain):
        def example_batch(self, samples):
            return {"x": torch.randn(samples, 4), "target": torch.randn(samples, 4)}

    class OwnLoss(Net):
        def forward(self, x):
            return super().forward(x).square().mean()

    number = 3

    def no_module():
        return {"a": 1}

    def raises():
        raise RuntimeError("boom")  # HERE raises

    def raises_lines():
        raise RuntimeError("two\\nlines")  # HERE raises_lines

    def leaves():
        sys.exit(3)  # HERE leaves

    def deep():
        return nn.Linear(4, -1)  # HERE deep

    def picky(width):
        raise ValueError("odd")  # HERE picky

    class NoBatch(Net):
        def example_batch(self, samples):
            raise ValueError("no data")  # HERE NoBatch

    class BatchLeaves(Net):
        def example_batch(self, samples):
            sys.exit(4)  # HERE BatchLeaves

    class ListBatch(Net):
        def example_batch(self, samples):
            return [1, 2]

    class NumberBatch(Net):
        def example_batch(self, samples):
            return {"x": 5}

    class Divides(Net):
        def forward(self, x):
            return x / (1 // 0)  # HERE Divides

    class Leaves(Net):
        def forward(self, x):
            sys.exit(5)  # HERE Leaves

    class WrongWidth(Net):
        def forward(self, x):
            return self.up(x[:, :3])  # HERE WrongWidth

    class Empty(Net):
        def forward(self, x):
            return x[:0].reshape(0, -1)  # HERE Empty

    class Depends(Net):
        def forward(self, x):
            return x if x.sum() > 0 else -x  # HERE Depends

    class WrongTarget(Net):
        def example_batch(self, samples):
            return {"x": torch.randn(samples, 4), "target": torch.randint(9, (samples, 3))}

    class Branches(Net):
        def forward(self, x):
            one, other = lambda x: x + 1, lambda x: x - 1
            return torch.cond(x.sum() > 0, one, other, (self.up(x),))

    class Item(Net):
        def forward(self, x):
            return self.up(x) * x.sum().item()  # HERE Item
"""
ROWS = {"shape": (4,), "dtype": "float32"}
KINDS = {"shape": (), "dtype": "int64", "below": 4}
REMEDY = (
    "Python reads a value of a tensor there (item(), float() or a condition), which is not known "
    "before training; choose with torch.where, or multiply by the tensor itself"
)


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that lies in the current folder only."""
    found = f"user_code_{tmp_path.name}"
    (tmp_path / f"{found}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    return found


def job(**fields: Any) -> Job:
    return Job.model_validate({"samples_per_microbatch": 2, "loss": "mse", **fields})


def error_of(model: str, **fields: Any) -> PipeplanError:
    with pytest.raises(PipeplanError) as raised:
        trace(model, job(**fields))
    (line,) = raised.value.problems
    assert "\n" not in line
    return raised.value


# --- traced ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "fields", "layers", "flops"),
    [
        ("Net", {}, ["up", "down", "loss"], 2 * 2 * 4 * 4),
        ("Net", {"model_arguments": {"width": 9}}, ["up", "down", "loss"], 2 * 2 * 4 * 9),
        # The job's inputs go before the model's own batch.
        (
            "Net",
            {"inputs": {"x": {**ROWS, "shape": (3, 4)}, "target": {**ROWS, "shape": (3, 4)}}},
            ["up", "down", "loss"],
            2 * 2 * 3 * 4 * 4,
        ),
        (
            "Plain",
            {"inputs": {"x": ROWS, "target": KINDS}, "loss": "cross_entropy"},
            ["up", "down", "loss"],
            2 * 2 * 4 * 4,
        ),
        ("OwnLoss", {"inputs": {"x": ROWS}, "loss": "output"}, ["up", "down"], 2 * 2 * 4 * 4),
    ],
)
def test_a_model_of_the_current_folder_is_traced(
    name: str, factory: str, fields: dict[str, Any], layers: list[str], flops: int
) -> None:
    graph = trace(f"{name}:{factory}", job(**fields))
    assert (graph.name, list(graph)) == (factory, layers)
    assert graph.layers["up"].forward_flops == flops


# --- refused --------------------------------------------------------------------------------------


def line_of(name: str, mark: str) -> str:
    lines = Path(f"{name}.py").read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# HERE {mark}"))
    return f"({name}.py:{number})"


@pytest.mark.parametrize(
    ("factory", "message", "cause"),
    [
        ("raises", "{n}:raises' cannot be built: RuntimeError: boom {at}", RuntimeError),
        ("raises_lines", "{n}:raises_lines' cannot be built: RuntimeError: two lines {at}", None),
        ("leaves", "{n}:leaves' cannot be built: SystemExit: 3 {at}", SystemExit),
        ("deep", "{n}:deep' cannot be built: RuntimeError: ", RuntimeError),
        ("NoBatch", "{n}:NoBatch.example_batch(2) failed: ValueError: no data {at}", ValueError),
        ("BatchLeaves", "{n}:BatchLeaves.example_batch(2) failed: SystemExit: 4 {at}", SystemExit),
        ("Divides", "{n}:Divides.forward failed", ZeroDivisionError),
        ("Leaves", "{n}:Leaves.forward failed", SystemExit),
        ("WrongWidth", "{n}:WrongWidth.forward failed", RuntimeError),
        ("Empty", "{n}:Empty.forward failed", RuntimeError),
    ],
)
def test_what_the_users_code_raises_is_told_with_its_line(
    name: str, factory: str, message: str, cause: type[BaseException] | None
) -> None:
    error = error_of(f"{name}:{factory}")
    at = line_of(name, factory)
    assert message.format(n=name, at=at) in str(error)
    assert at in str(error)
    assert REMEDY not in str(error)
    assert isinstance(error.__cause__, cause or Exception)


@pytest.mark.parametrize("factory", ["Depends", "Item"])
def test_control_flow_is_blamed_only_where_export_says_so(name: str, factory: str) -> None:
    error = str(error_of(f"{name}:{factory}"))
    assert error.startswith(f"torch.export cannot trace {name}:{factory}: DataDependentOutput")
    assert error.endswith(f"{line_of(name, factory)}; {REMEDY}")


@pytest.mark.parametrize(
    ("factory", "fields", "words"),
    [
        ("Plain", {}, "has no example_batch(samples) method and the job lists no inputs"),
        ("Plain", {"inputs": {"x": ROWS}}, "no 'target', which loss = 'mse' needs"),
        ("Plain", {"inputs": {"z": ROWS, "target": ROWS}}, "does not take the batch's inputs (z)"),
        (
            "Plain",
            {"inputs": {"x": {**ROWS, "shape": (5,)}, "target": ROWS}},
            ":Plain.forward failed",
        ),
        ("Net", {"loss": "output"}, "not a single number"),
        ("no_module", {}, "the factory returned dict, expected a torch.nn.Module"),
        ("Net", {"model_arguments": {"height": 3}}, "height"),
        ("Net", {"model_arguments": {"width": "wide"}}, "with model_arguments {'width': 'wide'}"),
        ("picky", {"model_arguments": {"width": 3}}, "{'width': 3} cannot be built: ValueError"),
        ("nothing", {}, "no callable 'nothing'; it has Plain, Net, OwnLoss, no_module, raises"),
        ("number", {}, "no callable 'number'"),
        ("ListBatch", {}, "ListBatch.example_batch(2) returned a list of 2, expected a mapping"),
        ("NumberBatch", {}, "NumberBatch.example_batch(2) returned a int for 'x', expected a map"),
        (
            "WrongTarget",
            {},
            "loss = 'mse' cannot be taken of what WrongTarget.forward returned, float32 [2, 4], "
            "and the target, int64 [2, 3]: RuntimeError: ",
        ),
        ("Branches", {}, "control-flow operators cannot be measured"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_with_the_reason(
    name: str, factory: str, fields: dict[str, Any], words: str
) -> None:
    error = str(error_of(f"{name}:{factory}", **fields))
    assert words in error
    assert REMEDY not in error


def test_arguments_that_the_factory_refuses_are_shown() -> None:
    """A mistake in the call itself has no line of the user's."""
    error = error_of("models.gpt:gpt2_small", model_arguments={"no_such_argument": 3})
    assert "'models.gpt:gpt2_small' with model_arguments {'no_such_argument': 3}" in str(error)
    assert str(error).endswith(
        "'no_such_argument'; correct model_arguments in the job file, or --set"
    )


# --- importing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax ({n}.py:2)"),
        (
            "\nimport nosuchthing\n",
            "ModuleNotFoundError: the module 'nosuchthing' that it imports ({n}.py:2) is missing; "
            "install it or correct that import",
        ),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 ({n}.py:2)"),
        ("1 / 0\n", "ZeroDivisionError: division by zero ({n}.py:1)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    name = f"unimportable_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    error = error_of(f"{name}:factory")
    assert str(error) == (
        f"model '{name}:factory': importing module {name!r} failed: {message.format(n=name)}"
    )
    assert error.__cause__ is not None


NO_MODULE_NAME = "is not the name of a module"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("models.no_such:factory", "no module 'models.no_such'"),
        ("no_such_package.deep:factory", "no module 'no_such_package'"),
        ("models.gpt", "expected module:factory"),
        (":factory", "expected module:factory"),
        ("models.gpt:", "expected module:factory"),
        ("models.gpt:gpt_huge", "it has"),
        *((f"{path}:f", NO_MODULE_NAME) for path in ("../x", "models/gpt.py", ".gpt", "..")),
        *((f"{path}:f", NO_MODULE_NAME) for path in ("models..gpt", "models.", "models\\gpt")),
        *((f"{path}:f", "") for path in ("a b", "1x", "x\0", "no-such", "-")),
    ],
)
def test_a_name_that_finds_no_factory_is_refused(model: str, words: str) -> None:
    assert words in str(error_of(model))
