"""Imports of user code, and one-line descriptions of exceptions that it raises."""

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from planner.errors import PipeplanError
from planner.tracing.torch_private import EXPORT_MODULES

_PLANNER = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})
_NOT_OWN = (_PLANNER, "<", *_LIBRARIES)

FAILURES = (Exception, SystemExit)
"""Exceptions of user code; ``sys.exit`` in it must not end this process silently."""

_MOST_CHARACTERS = 400


def one_line(error: BaseException) -> str:
    """Return ``Type: message (file:line)`` on one line, with the user's line, not a library's.

    The traceback of ``error`` has to begin in this package, where the user's code was called. The
    place is left out if none of the user's lines took part.
    """
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    paragraph = message.strip().split("\n\n")[0]  # Torch's hints and graphs come after it.
    words = " ".join(paragraph.split())
    if len(words) > _MOST_CHARACTERS:
        words = words[: _MOST_CHARACTERS - 1] + "…"
    where = place(error)
    return f"{type(error).__name__}{': ' if words else ''}{words}{f' ({where})' if where else ''}"


def place(error: BaseException) -> str:
    """Return ``file:line`` of the user's innermost line in a traceback, or the empty string."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return shown_place(error.filename, error.lineno)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_OWN)]
    return shown_place(own[-1].filename, own[-1].lineno) if own else ""


def is_users_own(frame: FrameType) -> bool:
    """Return whether a frame runs the user's code, not this package or an installed library."""
    return not frame.f_code.co_filename.startswith(_NOT_OWN)


def shown_place(filename: str, line: int | None) -> str:
    """Return ``file:line`` with the file's path from the current folder."""
    path = Path(filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"


def is_exports_own(error: BaseException) -> bool:
    """Return whether torch.export raised the exception because it cannot trace something.

    The exception's module decides, since the classes are private to torch and have moved.
    """
    return type(error).__module__.startswith(EXPORT_MODULES)


def import_callable(name: str, what: str, example: str) -> Callable[..., Any]:
    """Import ``module:callable``, including from the current folder, as ``python -m`` would.

    Only call this with a name that the user typed or the zoo contains: importing runs code.

    Args:
        name: name of module and callable.
        what: its purpose in messages, such as ``model``.
        example: an example of such a name, for messages.

    Raises:
        PipeplanError: if the name has no such form, the module or callable does not exist, or
            importing the module fails.
    """
    module_name, _, attribute = name.partition(":")
    asker = f"{what} {name!r}"
    if not module_name or not attribute:
        kind = "factory" if what in ("model", "data", "optimizer") else "function"
        raise PipeplanError(f"{asker}: expected module:{kind}, for example {example}")
    if "/" in module_name or "\\" in module_name or "" in module_name.split("."):
        file = example.partition(":")[0].replace(".", "/")
        raise PipeplanError(
            f"{asker}: {module_name!r} is not the name of a module; write folders and file "
            f"as Python imports them from the current folder, for example {example} for {file}.py"
        )
    module = _import_module(module_name, asker)
    found = getattr(module, attribute, None)
    if not callable(found):
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module_name
        ]
        raise PipeplanError(
            f"{asker}: module {module_name!r} has no callable {attribute!r}; "
            f"it has {', '.join(known) or 'none'}"
        )
    return found  # type: ignore[no-any-return]


def _import_module(module_name: str, asker: str) -> object:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise PipeplanError(
                f"{asker}: no module {error.name!r} in {here} or on PYTHONPATH; "
                f"{_remedy(error.name)}"
            ) from error
        missing, where = repr(error.name) if error.name else str(error), place(error)
        raise PipeplanError(
            f"{asker}: importing module {module_name!r} failed: ModuleNotFoundError: "
            f"the module {missing} that it imports{f' ({where})' if where else ''} is missing; "
            "install it or correct that import"
        ) from error
    except FAILURES as error:
        raise PipeplanError(
            f"{asker}: importing module {module_name!r} failed: {one_line(error)}"
        ) from error


def _remedy(module_name: str) -> str:
    """Say what to do about a missing module; the zoo is no part of an installation."""
    if module_name.partition(".")[0] != "models":
        return (
            "correct its name if it was renamed or moved, or name the folder that holds it in "
            "PYTHONPATH"
        )
    return (
        "the zoo of models is in Pipeplan's repository and is not installed: run in a checkout, "
        "or name a module:factory of your own in this folder"
    )
