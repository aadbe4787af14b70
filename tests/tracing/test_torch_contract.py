"""What Pipeplan counts on in torch beyond its public API; a new version of torch has to pass."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from planner.errors import PipeplanError
from planner.tracing import torch_private

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = re.compile(
    r"torch(\.\w+)*\._(?!_version__)\w+|\._cdata|\._schema\b|\._overloadpacket|import _pytree"
)


def exported_graph(module: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    exported = torch.export.export(module.train(), inputs, strict=False).module()
    assert isinstance(exported, fx.GraphModule)
    return exported


def operators(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if isinstance(n.target, torch_private.OpOverload)]


def test_no_other_file_touches_a_private_name() -> None:
    found = []
    for package in ("planner", "executor", "models"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = re.sub(r'"""(.|\n)*?"""', "", path.read_text())
            if path.name != "torch_private.py" and (match := PRIVATE.search(text)):
                found.append(f"{path.relative_to(ROOT)}: {match.group()}")
    assert found == []


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0a0+git1234", "3.0"])
def test_this_and_newer_versions_are_accepted(version: str) -> None:
    torch_private.require_supported(version)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.1+cu117"])
def test_an_older_version_is_refused_with_the_remedy(version: str) -> None:
    message = rf'torch {re.escape(version)} is too old.*pip install "torch>=2\.11"'
    with pytest.raises(PipeplanError, match=message):
        torch_private.require_supported(version)


def test_batch_normalisation_has_its_buffers_and_momentum_where_they_are_looked_for() -> None:
    arguments = torch_private.schema_arguments(torch.ops.aten.batch_norm.default)
    names = [argument.name for argument in arguments]
    assert (names[3], names[4], names[6]) == ("running_mean", "running_var", "momentum")
    nodes = operators(exported_graph(nn.BatchNorm1d(4), torch.randn(2, 4)))
    assert [node.target for node in nodes] == [
        torch.ops.aten.add_.Tensor,
        torch.ops.aten.batch_norm.default,
    ]


def test_autocast_around_an_export_tells_the_types_it_lowers_to() -> None:
    module = nn.Linear(4, 3)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        graph = exported_graph(module, torch.randn(2, 4))
    assert [n.meta["val"].dtype for n in operators(graph)] == [torch.bfloat16]


def test_the_default_group_has_a_store_that_others_may_use() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        store = dist.PrefixStore("of ours", torch_private.default_store())
        store.set("key", "value")
        assert store.get("key") == b"value"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_drops_its_weights_as_dropout_of_ones_does(is_masked: bool) -> None:
    """The weights come without a mixture of values; a mask of booleans has to be one of numbers."""
    query, key, value = torch.randn(3, 2, 2, 16, 8, dtype=torch.double).unbind()
    mask = torch.rand(16, 16) < 0.7 if is_masked else None
    torch.manual_seed(0)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask, 0.3)
    torch.manual_seed(0)
    kept = torch.ops.aten.dropout(torch.ones(2, 2, 16, 16, dtype=torch.double), 0.3, True)
    added = None if mask is None else torch.where(mask, 0.0, float("-inf"))
    _, weights = torch_private.MATH_ATTENTION(query, key, value[..., :0], added, 0.0, False)
    torch.testing.assert_close((weights * kept) @ value, expected, rtol=1e-12, atol=1e-12)
