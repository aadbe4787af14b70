"""What to tell of an exception that the user's own code raised: one line with its place."""

import sysconfig
import traceback
from pathlib import Path

from planner.tracing.torch_private import EXPORT_MODULES

_PLANNER = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})

FAILURES = (Exception, SystemExit)
"""What the user's code may raise; ``sys.exit`` in it shall not end this process unsaid."""

_MOST_CHARACTERS = 400


def told(error: BaseException) -> str:
    """``Type: message (file:line)`` on one line; the place is the user's, not a library's.

    The traceback of ``error`` has to begin in this package, where the user's code was called. The
    place is left out where none of the user's lines took part.
    """
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    paragraph = message.strip().split("\n\n")[0]  # Torch's hints and graphs come after it.
    words = " ".join(paragraph.split())
    if len(words) > _MOST_CHARACTERS:
        words = words[: _MOST_CHARACTERS - 1] + "…"
    where = place(error)
    return f"{type(error).__name__}{': ' if words else ''}{words}{f' ({where})' if where else ''}"


def place(error: BaseException) -> str:
    """``file:line`` of the user's innermost line in a traceback, or the empty string."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return _shown(error.filename, error.lineno)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PLANNER, "<"))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return _shown(own[-1].filename, own[-1].lineno) if own else ""


def _shown(filename: str, line: int | None) -> str:
    path = Path(filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"


def is_exports_own(error: BaseException) -> bool:
    """Whether the exception is of a class of torch.export: it cannot trace what it met.

    By the class's module: the classes themselves are private to torch and have moved.
    """
    return type(error).__module__.startswith(EXPORT_MODULES)
