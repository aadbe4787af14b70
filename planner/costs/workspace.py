"""What a stage holds beside its stashes while its layers run."""

from __future__ import annotations

from collections.abc import Iterable


def workspace_bytes(layers: Iterable[tuple[int, int]]) -> int:
    """The most that a stage holds beside parameters and whole stashes, at any time.

    While a layer runs the stage holds that layer's peak and what the layers before it keep. Of the
    microbatch that runs, what this layer and those behind it keep is either among the peak, gone
    or yet to be made; it is counted with the stashes, and taken off here.

    Args:
        layers: of the stage, in executable order: peak bytes, and bytes that are kept from forward
            until backward.
    """
    most = 0
    for peak_bytes, kept_bytes in layers:
        most = max(most, peak_bytes) - kept_bytes
    return max(most, 0)


def split_workspace_bytes(layers: Iterable[tuple[int, int, int]]) -> int:
    """The same while input gradients run without the weight gradients.

    What weight gradients need of the layers behind the one that runs is not gone then; and where
    it is more than the layer kept, it is made in its input gradient.

    Args:
        layers: of the stage: peak bytes, bytes that are kept from forward until backward, and
            those kept from input gradient until weight gradient.
    """
    most = 0
    for peak_bytes, kept_bytes, late_bytes in layers:
        more_bytes = late_bytes - kept_bytes
        most = max(most + more_bytes, peak_bytes - kept_bytes + max(more_bytes, 0))
    return max(most, 0)
