"""Whatever the user's code raises is told in one line, with the user's own line."""

import textwrap
from pathlib import Path

import pytest

from planner.errors import PipeplanError
from planner.job import Job
from planner.tracing.trace import trace

MODULE = """
    import sys

    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = nn.Linear(4, 4)

        def forward(self, x):
            return self.only(x)

        def example_batch(self, samples):
            return {"x": torch.randn(samples, 4), "target": torch.randn(samples, 4)}

    def raises():
        raise RuntimeError("boom")  # HERE raises

    def raises_lines():
        raise RuntimeError("two\\nlines")  # HERE raises_lines

    def leaves():
        sys.exit(3)  # HERE leaves

    def deep():
        return nn.Linear(4, -1)  # HERE deep

    def numbers(width):
        raise ValueError("odd")  # HERE numbers

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
            return self.only(x[:, :3])  # HERE WrongWidth

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
            return torch.cond(x.sum() > 0, one, other, (self.only(x),))

    class Item(Net):
        def forward(self, x):
            return self.only(x) * x.sum().item()  # HERE Item
"""
REMEDY = (
    "; Python reads a value of a tensor there (item(), float() or a condition), which is not known "
    "before training; choose with torch.where, or multiply by the tensor itself"
)


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a module in the current folder."""
    found = f"user_errors_{tmp_path.name}"
    (tmp_path / f"{found}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return found


def error_of(model: str, **arguments: int) -> PipeplanError:
    with pytest.raises(PipeplanError) as raised:
        trace(model, Job(samples_per_microbatch=2, loss="mse"), **arguments)
    (line,) = raised.value.problems
    assert "\n" not in line
    return raised.value


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


def test_arguments_that_the_factory_refuses_are_shown() -> None:
    """A mistake in the call itself has no line of the user's."""
    error = error_of("models.gpt:gpt2_small", no_such_argument=3)
    assert "'models.gpt:gpt2_small' with model_arguments {'no_such_argument': 3}" in str(error)
    assert str(error).endswith(
        "'no_such_argument'; correct model_arguments in the job file, or --set"
    )


def test_a_value_that_the_factory_refuses_is_shown(name: str) -> None:
    error = error_of(f"{name}:numbers", width=3)
    assert f"{{'width': 3}} cannot be built: ValueError: odd {line_of(name, 'numbers')};" in str(
        error
    )


@pytest.mark.parametrize(
    ("factory", "found"), [("ListBatch", "a list of 2"), ("NumberBatch", "a int for 'x'")]
)
def test_an_example_batch_that_is_none_is_refused(name: str, factory: str, found: str) -> None:
    assert str(error_of(f"{name}:{factory}")) == (
        f"{name}:{factory}.example_batch(2) returned {found}, expected a mapping of tensors by "
        "the names of forward's arguments"
    )


def test_control_flow_is_blamed_only_where_export_says_so(name: str) -> None:
    error = str(error_of(f"{name}:Depends"))
    assert error.startswith(f"torch.export cannot trace {name}:Depends: DataDependentOutput")
    assert error.endswith(f"{line_of(name, 'Depends')}{REMEDY}")


def test_a_target_that_does_not_fit_the_loss_is_shown_with_the_output(name: str) -> None:
    error = str(error_of(f"{name}:WrongTarget"))
    assert error.startswith(
        "loss = 'mse' cannot be taken of what WrongTarget.forward returned, float32 [2, 4], and "
        "the target, int64 [2, 3]: RuntimeError: "
    )
    assert REMEDY not in error


def test_control_flow_operators_are_refused_by_the_measurement(name: str) -> None:
    error = error_of(f"{name}:Branches")
    assert "torch.cond (module" in str(error)
    assert "control-flow operators cannot be measured" in str(error)


def test_an_operator_that_needs_data_is_refused_with_its_line(name: str) -> None:
    assert str(error_of(f"{name}:Item")).endswith(f"{line_of(name, 'Item')}{REMEDY}")


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


@pytest.mark.parametrize(
    "module", ["../x", "models/gpt.py", ".gpt", "..", "models..gpt", "models.", "models\\gpt"]
)
def test_a_path_is_no_module_name(module: str) -> None:
    assert "is not the name of a module" in str(error_of(f"{module}:factory"))


@pytest.mark.parametrize("module", ["a b", "1x", "x\0", "no-such", "-"])
def test_a_name_that_no_module_has_is_refused(module: str) -> None:
    error_of(f"{module}:factory")
