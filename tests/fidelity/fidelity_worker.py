"""One rank of many trainings; what any of them raises is its result.

``torchrun fidelity_worker.py FOLDER``, with the files of :mod:`runs_worker`.
"""

import json
import sys
from pathlib import Path

import runs_worker
import torch.distributed as dist


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    for path in sorted(folder.glob("*.toml")):
        try:
            found: object = runs_worker.run(path)
        except Exception as error:
            found = f"{type(error).__name__} in training: {error}"
        path.with_suffix(f".{dist.get_rank()}").write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
