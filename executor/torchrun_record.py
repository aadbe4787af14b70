"""The reason of a failure where torchrun shows it: last, after its own report."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from planner.errors import PipeplanError

_PATH = "TORCHELASTIC_ERROR_FILE"


def record_for_torchrun(error: Exception) -> None:
    """Write it to the file torchrun asks for; its last lines are of the rank that failed first.

    An error that names what the user can mend is told without its traceback. The form is that of
    ``torch.distributed.elastic.multiprocessing.errors``.
    """
    path = os.environ.get(_PATH)
    if path is None or _is_followed(error):
        return
    told = (
        "\n".join(f"error: {problem}" for problem in error.problems)
        if isinstance(error, PipeplanError)
        else "".join(traceback.format_exception(error))
    )
    extra = {"py_callstack": told, "timestamp": str(int(time.time()))}
    # It has been told on stderr already.
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": told, "extraInfo": extra}}))


def _is_followed(error: Exception) -> bool:
    """Whether it comes of another rank's: it adds nothing, and could be taken for the first."""
    # Loading it takes seconds, while other ranks wait for the first to end with wrong usage.
    if "executor.failure" not in sys.modules:
        return False
    from executor.failure import FollowedError

    return isinstance(error, FollowedError)
