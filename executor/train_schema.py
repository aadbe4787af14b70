"""The JSON Schema of training files: ``python -m executor.train_schema``."""

from __future__ import annotations

import sys

from executor.config import TrainingConfig
from planner.artifacts.schemas import Artifact, schema_text

TRAIN = Artifact("Pipeplan training file", TrainingConfig)


def main() -> None:
    """Print it."""
    sys.stdout.write(schema_text(TRAIN))


if __name__ == "__main__":
    main()
