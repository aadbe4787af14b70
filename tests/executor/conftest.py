"""What tests of several ranks in one process share."""

from collections.abc import Iterator

import pytest
from exports import SharedExports

from executor.launch import model as launched


@pytest.fixture(scope="module")
def shared_exports() -> Iterator[None]:
    """A model is exported once for all ranks, which takes a second or more."""
    shared = SharedExports()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launched, "export_step", shared.export)
        patch.setattr(launched, "nodes_with_gradient", shared.gradients)
        yield
