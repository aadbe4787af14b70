"""The JSON Schema of training files: ``python -m executor.launch.train_schema``."""

from __future__ import annotations

import sys

from executor.launch.config import TrainingConfig
from planner.schemas import Artifact, schema_text

TRAIN = Artifact("Pipeplan training file", TrainingConfig)


def main() -> None:
    """Print it."""
    sys.stdout.write(schema_text(TRAIN))


if __name__ == "__main__":
    main()
