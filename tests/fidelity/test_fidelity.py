"""What people write trains as in one process, to 1e-5, or is refused by name before it trains."""

import inspect
import re
from pathlib import Path

import models_of_gradients
import models_of_state
import pytest
from fidelity_runs import KINDS, Trainings

pytestmark = pytest.mark.extensive

REFUSED = {
    "DirtyFunction": "autograd Function _Doubled .* writes into its argument",
    "GradientInside": "forward failed while torch.export traced it",
    "ModuleBackwardHook": "module 'blocks.1' .* has a backward hook",
    "ModuleBackwardPreHook": "module 'blocks.1' .* has a backward hook",
    "TensorHook": "forward registers a hook on a tensor",
    "Autocast": "forward switches on torch.autocast",
    "AutocastDecorator": "forward switches on torch.autocast",
    "AutocastParts": "forward switches on torch.autocast",
    "Momentum": "forward writes into the parameter 'slow.weight'",
    "ClampedWeights": "forward writes into the parameter 'blocks.0.up.weight'",
    "ClampedData": "forward writes into the parameter 'blocks.0.up.weight'",
    "BoundedEmbedding": "forward writes into the parameter 'emb.weight'",
    "KeptTensor": "kept is a tensor in a plain attribute",
    "KeptList": "queue is a tensor in a plain attribute",
    "PythonCounter": "forward keeps calls from call to call",
    "PlainTable": "table is a tensor in a plain attribute",
    "PythonCoin": "forward draws with Python's random",
    "NumpyNoise": "forward draws with Python's numpy.random",
    "OwnGenerator": "forward draws with a torch.Generator of its own",
    "RoutedExperts": "the shape of a value depends on the data",
    "BranchOnItem": "Python reads a value of a tensor there",
    "BranchOnData": "Python reads a value of a tensor there",
}
REFUSED_MIXED = {
    "ParameterHook": "ParameterHook: the exported step fails where the model itself trains",
    "PostAccumulateHook": "PostAccumulateHook: the exported step fails where the model itself",
    "AverageInBuffer": "AverageInBuffer: the step that would run differs from eager autograd",
    "SpectralNorm": "SpectralNorm: the step that would run differs from eager autograd",
    "CountedSteps": "differs from eager autograd in step 1: buffer count has",
}
MODELS = [
    f"{module.__name__}:{name}"
    for module in (models_of_gradients, models_of_state)
    for name, made in vars(module).items()
    if not name.startswith("_")
    and getattr(made, "__module__", None) == module.__name__
    and (inspect.isclass(made) or name.startswith("compiled"))
]
CASES = [(model, kind) for model in MODELS for kind in KINDS]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(Path(tmp_path_factory.mktemp("trainings")), CASES)


def test_there_are_sixty_models_and_more() -> None:
    assert len(MODELS) >= 60


@pytest.mark.parametrize(
    ("model", "kind"), CASES, ids=[f"{model.partition(':')[2]}-{kind}" for model, kind in CASES]
)
def test_it_trains_as_one_process_or_is_refused_by_name(
    model: str, kind: str, trainings: Trainings
) -> None:
    name, found = model.partition(":")[2], trainings.outcome((model, kind))
    words = REFUSED.get(name) or (REFUSED_MIXED.get(name) if kind == "mixed" else None)
    if words is not None:
        assert re.search(words, found), found
    else:
        assert found.startswith("error "), found
        assert float(found.removeprefix("error ")) <= 1e-5
