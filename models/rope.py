"""Rotary position embedding.

Su et al., 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
"""

import torch
from torch import Tensor


def rope_tables(
    length: int, head_size: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of every position's angles.

    Args:
        length: number of positions T.
        head_size: features of one head, even.
        base: the wavelengths grow geometrically from 2 pi towards 2 pi times this.
        device: where to make the tables.

    Returns:
        Two float32 tensors [T, head_size / 2].
    """
    # float32 whatever the model's dtype: bfloat16 cannot tell apart positions above 256.
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions[:, None] * base**-exponents
    return angles.cos(), angles.sin()


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair of features by the angle of its position.

    Feature i is paired with feature i + head_size / 2, the layout of published checkpoints that
    have separate ``q_proj`` and ``k_proj``.

    Args:
        heads: queries or keys, [samples, heads, T, head_size].
        cos: as ``rope_tables`` gives it, [T, head_size / 2].
        sin: likewise.

    Returns:
        The rotated heads, in their shape and dtype.
    """
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.type_as(heads)
