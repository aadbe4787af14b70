"""Names of devices and stages as people read them, shared by traces, charts and tables."""

import re
from collections.abc import Iterable, Sequence

# A number with a leading zero is not extended to a range: gpu08-9 would not say what it means.
_NUMBERED = re.compile(r"(.*?)(?<!\d)(0|[1-9]\d*)")


def compress_devices(names: Iterable[str]) -> str:
    """Device names with runs of consecutive numbers drawn together.

    ``n0/gpu0 n0/gpu1 n0/gpu2 ws1`` becomes ``n0/gpu0-2, ws1``; the order stays.
    """
    runs: list[tuple[str, int | None, int]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, number = (match[1], int(match[2])) if match else (name, None)
        if runs and number is not None:
            last, first, length = runs[-1]
            if first is not None and last == prefix and number == first + length:
                runs[-1] = (last, first, length + 1)
                continue
        runs.append((prefix, number, 1))
    return ", ".join(_run_name(*run) for run in runs)


def _run_name(prefix: str, first: int | None, length: int) -> str:
    if first is None:
        return prefix
    return f"{prefix}{first}" + (f"-{first + length - 1}" if length > 1 else "")


def stages_label(stages: Sequence[int]) -> str:
    """Stage indices for a row's label, such as ``stage 3`` or ``stages 0, 4``."""
    return f"stage{'s' if len(stages) > 1 else ''} {compress_devices(map(str, stages))}"
