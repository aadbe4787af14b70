"""The pipelines of a plan, and each as a plan of its own."""

from __future__ import annotations

import pytest
from builders import chain_problem, plan_by_hand  # type: ignore[import-not-found]

