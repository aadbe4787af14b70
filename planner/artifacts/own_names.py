"""Fields that take known words, or ``module:name`` of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def known_or_own_schema(known: Sequence[str]) -> dict[str, Any]:
    """What a JSON Schema says of a field that takes these words or ``module:name``."""
    own = {"pattern": "^[^:]+:[^:]+$"}
    return {"anyOf": [{"enum": list(known)}, own]} if known else own
