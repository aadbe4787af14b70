"""A cluster as TOML text, the form in which people write cluster files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.artifacts.cluster import Cluster


def cluster_toml(cluster: Cluster) -> str:
    """A cluster file with nothing abbreviated; reading it gives an equal cluster.

    TOML 1.0 (https://toml.io/en/v1.0.0).
    """
    lines = [
        f"format = {_value(cluster.format)}",
        f"name = {_value(cluster.name)}",
        *([] if cluster.currency is None else [f"currency = {_value(cluster.currency)}"]),
        f"switches = {_value(list(cluster.switches))}",
    ]
    for name, kind in cluster.device_types.items():
        lines += ["", f"[device_types.{_value(name)}]", *_fields(kind.model_dump())]
    for device in cluster.devices:
        lines += ["", "[[devices]]", *_fields(device.model_dump())]
    for link in cluster.links:
        data = link.model_dump()
        lines += ["", "[[links]]", *_fields({"between": data.pop("between"), **data})]
    return "\n".join(lines) + "\n"


def _fields(data: dict[str, Any]) -> list[str]:
    return [f"{name} = {_value(value)}" for name, value in data.items()]


def _value(value: Any) -> str:
    """Strings, numbers, booleans and lists are written alike in TOML and JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_value(k)} = {_value(v)}" for k, v in value.items()) + " }"
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    # The one control character that JSON leaves as it is and TOML does not allow.
    return text.replace("\x7f", "\\u007f")
