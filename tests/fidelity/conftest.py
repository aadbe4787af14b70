"""The models of this folder, and the helpers of tests/executor, are importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "executor")]
