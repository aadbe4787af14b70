"""What people write trains as in one process, to 1e-5, or is refused by name before it trains."""

import re
from pathlib import Path

import pytest
from fidelity_runs import Trainings
from test_kept_or_refused import MODELS, REFUSED

pytestmark = pytest.mark.extensive

REFUSED_MIXED = {
    "ParameterHook": "ParameterHook: the exported step fails where the model itself trains",
    "PostAccumulateHook": "PostAccumulateHook: the exported step fails where the model itself",
    "AverageInBuffer": "AverageInBuffer: the step that would run differs from eager autograd",
    "SpectralNorm": "SpectralNorm: the step that would run differs from eager autograd",
    "CountedSteps": "differs from eager autograd in step 1: buffer count has",
}
CASES = [
    (f"{MODELS[name].__module__}:{name}", kind)
    for kind, names in (("mixed", MODELS.keys() - REFUSED.keys()), ("chain", REFUSED_MIXED))
    for name in sorted(names)
]
"""The other models are refused when they are traced, see test_kept_or_refused.py."""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(Path(tmp_path_factory.mktemp("trainings")), CASES)


@pytest.mark.parametrize(
    ("model", "kind"), CASES, ids=[f"{model.partition(':')[2]}-{kind}" for model, kind in CASES]
)
def test_it_trains_as_one_process_or_is_refused_by_name(
    model: str, kind: str, trainings: Trainings
) -> None:
    name, found = model.partition(":")[2], trainings.outcome((model, kind))
    words = REFUSED_MIXED.get(name) if kind == "mixed" else None
    if words is not None:
        assert re.search(words, found), found
    else:
        assert found.startswith("error "), found
        assert float(found.removeprefix("error ")) <= 1e-5
