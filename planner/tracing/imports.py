"""Importing what the user names as ``module:callable``."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.errors import PipeplanError
from planner.tracing.user_code import FAILURES, place, told

_ZOO = "models"


def import_callable(name: str, what: str, example: str) -> Callable[..., Any]:
    """Import ``module:callable``, the current folder included, as ``python -m`` would.

    Only call this with a name the user typed or the zoo holds: importing runs code.

    Args:
        name: of module and callable.
        what: it is for, in messages, such as ``model``.
        example: of such a name, in messages.

    Raises:
        PipeplanError: if the name has no such form, the module or callable does not exist, or
            importing the module fails.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise PipeplanError(
            f"{what} {name!r}: expected module:{_kind(what)}, for example {example}"
        )
    if "/" in module_name or "\\" in module_name or "" in module_name.split("."):
        file = example.partition(":")[0].replace(".", "/")
        raise PipeplanError(
            f"{what} {name!r}: {module_name!r} is not the name of a module; write folders and file "
            f"as Python imports them from the current folder, for example {example} for {file}.py"
        )
    module = _import_module(module_name, f"{what} {name!r}")
    found = getattr(module, attribute, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if _is_own(value, module_name)]
        raise PipeplanError(
            f"{what} {name!r}: module {module_name!r} has no callable {attribute!r}; "
            f"it has {', '.join(known) or 'none'}"
        )
    return found  # type: ignore[no-any-return]


def _kind(what: str) -> str:
    return "factory" if what in ("model", "data", "optimizer") else "function"


def _import_module(module_name: str, asker: str) -> object:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise PipeplanError(_failed_import(asker, module_name, error)) from error
        raise PipeplanError(
            f"{asker}: no module {error.name!r} in {here} or on PYTHONPATH{_about_zoo(error.name)}"
        ) from error
    except FAILURES as error:
        raise PipeplanError(
            f"{asker}: importing module {module_name!r} failed: {told(error)}"
        ) from error


def _about_zoo(module_name: str) -> str:
    """The zoo is part of the repository, not of an installation."""
    if module_name.partition(".")[0] != _ZOO:
        return ""
    return (
        "; the zoo of models is in Pipeplan's repository and is not installed: run in a checkout, "
        "or name a module:factory of your own in this folder"
    )


def _failed_import(asker: str, module_name: str, error: ModuleNotFoundError) -> str:
    missing = repr(error.name) if error.name else str(error)
    where = place(error)
    return (
        f"{asker}: importing module {module_name!r} failed: ModuleNotFoundError: "
        f"the module {missing} that it imports{f' ({where})' if where else ''} is missing; "
        "install it or correct that import"
    )


def _is_own(value: object, module_name: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module_name
