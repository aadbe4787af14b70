"""A rank of ``torchrun -m executor`` that writes which files its iterations pass through.

Usage: ``torchrun … -m benchmarks.structure.watched_rank FOLDER plan.json [options of executor]``;
FOLDER receives one JSON file for each rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

import executor.__main__
from benchmarks.structure.entered import EnteredFiles


def main() -> None:
    """Train, write the files and end at once, as the executor does."""
    folder = Path(sys.argv.pop(1))
    entered = EnteredFiles(Path(executor.__main__.__file__).parent)
    register_optimizer_step_post_hook(lambda *_: entered.end_step())
    status = entered.watch(executor.__main__.main)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(entered.files))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
