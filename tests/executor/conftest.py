"""What tests of several ranks in one process share."""

from collections.abc import Iterator

import pytest
from exports import SharedExports

from executor.launch import model as launched


@pytest.fixture(scope="session")
def exports_of_all_files() -> SharedExports:
    """Exports of models, each of which takes a second or more."""
    return SharedExports()


@pytest.fixture(scope="module")
def shared_exports(exports_of_all_files: SharedExports) -> Iterator[None]:
    """A model is exported once for all ranks and all files that ask for this."""
    shared = exports_of_all_files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launched, "export_step", shared.export)
        patch.setattr(launched, "nodes_with_gradient", shared.gradients)
        yield
