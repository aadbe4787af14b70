"""Code of loaded functions, exchanged for that of a changed source file.

Importing a mutated module afresh would mean importing all that imports it: the planner and the
tests. Instead each function that a file defined gets the code that its namesake has in the changed
source, wherever decorators, classes and closures keep the function.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

_CO_NEWLOCALS = 0x2  # set for functions, not for the bodies of classes and modules


def loaded_functions(path: Path) -> list[FunctionType]:
    """Return every living function that was defined by a file."""
    functions = (each for each in gc.get_objects() if type(each) is FunctionType)
    return [each for each in functions if each.__code__.co_filename == str(path)]


def exchange(functions: Sequence[FunctionType], path: Path, source: str) -> bool:
    """Give the functions of a file the code that they have in a changed source.

    Returns:
        Whether any function does something else now; not so where both compile to the same.

    Raises:
        ValueError: where the free variables of a closure changed.
    """
    changed = _by_name(_functions_in(compile(source, str(path), "exec", dont_inherit=True)))
    loaded = _by_name({function.__code__ for function in functions})
    renewed = {
        old: new
        for name, codes in loaded.items()
        for old, new in zip(codes, changed.get(name, ()), strict=False)
    }
    for function in functions:
        function.__code__ = renewed.get(function.__code__, function.__code__)
    return any(_instructions(old) != _instructions(new) for old, new in renewed.items())


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & _CO_NEWLOCALS:
                yield constant
            yield from _functions_in(constant)


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """Return what a code does, without where it stands in the source."""
    constants = (
        _instructions(constant) if isinstance(constant, CodeType) else repr(constant)
        for constant in code.co_consts
    )
    return (code.co_code, code.co_names, code.co_varnames, *constants)


def _by_name(codes: Iterable[CodeType]) -> dict[str, list[CodeType]]:
    """Return codes by qualified name; those of one name, as of a property, in their order."""
    named: defaultdict[str, list[CodeType]] = defaultdict(list)
    for code in sorted(codes, key=lambda code: code.co_firstlineno):
        named[code.co_qualname].append(code)
    return named
