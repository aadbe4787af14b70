"""Checkpoints that hold tensors by the model's own names and run no code when read.

:func:`save_checkpoint` writes one, all ranks together and whole or not at all;
:class:`Checkpoint` reads one, whatever plan wrote it; :class:`Ranks` is how the ranks agree.
"""

from executor.checkpoint.manifest import Box, Piece
from executor.checkpoint.ranks import Ranks
from executor.checkpoint.read import Checkpoint
from executor.checkpoint.write import save_checkpoint

__all__ = ["Box", "Checkpoint", "Piece", "Ranks", "save_checkpoint"]
