"""The reason of a failure where torchrun shows it: last, after its own report."""

from __future__ import annotations

import json
import os
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
    # Only now: it loads torch, and wrong usage is told without.
    from executor.failure import FollowedError

    path = os.environ.get(_PATH)
    # Who ends because another one failed has nothing to add, and could be taken for the first.
    if path is None or isinstance(error, FollowedError):
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
