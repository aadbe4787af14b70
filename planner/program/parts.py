"""How numba compiles functions that only other compiled functions call: as parts of these.

By itself numba links all that a function calls into it, optimises the whole, and turns it into
machine code, for each function on the way up a chain of calls. Here that is done for the functions
that Python calls alone: those below are translated to LLVM's language, once each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numba.core import untyped_passes as untyped
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import (
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """The code of one function, which those that link it optimise together with theirs."""

    _shared_module: Any

    def _optimize_functions(self, ll_module: Any) -> None:
        """Leave that to the functions that link this one: they optimise it together with theirs."""

    def finalize(self) -> None:
        """Take no more code."""
        self._finalized = True

    def parts(self) -> Iterator[Any]:
        """Yield the modules of this function and of all that it calls, for linking, once each."""
        seen: dict[int, Any] = {}
        waiting: list[Any] = [self]
        while waiting:
            library = waiting.pop()
            if id(library) in seen:
                continue
            seen[id(library)] = library
            if isinstance(library, _Part):
                waiting += library._linking_libraries
                yield library.own
            else:
                yield library._get_module_for_linking()

    @property
    def own(self) -> Any:
        """The module of this function alone, which several others may link."""
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage.name == "external":
                function.linkage = "linkonce_odr"
        return self._final_module

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            first, *rest = self.parts()
            self._shared_module = first.clone()
            for module in rest:
                self._shared_module.link_in(module, preserve=True)
        return self._shared_module


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):  # type: ignore[misc]
    """Translates a function, and makes it known to those that call it."""

    _name = "planner_part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        # numba knows the part by a built-in method with any arguments. If Python calls the part,
        # this one raises a KeyError with the words in braces.
        key = f"{{{state.func_id.func_qualname} is called by compiled functions alone}}".format
        state.targetctx.insert_user_function(key, state["cr"].fndesc, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=key)
        return True


class PartCompiler(CompilerBase):  # type: ignore[misc]
    """Compiles parts: only the passes that plain loops over numbers need."""

    def define_pipelines(self) -> list[PassManager]:
        """Return the passes."""
        found = PassManager("planner_part")
        for each in (
            untyped.TranslateByteCode,
            untyped.FixupArgs,
            untyped.IRProcessing,
            untyped.GenericRewrites,
            untyped.ReconstructSSA,
            NopythonTypeInference,
            PreLowerStripPhis,
            IRLegalization,
            _PartLowering,
            NoPythonBackend,
        ):
            found.add_pass(each, each.__name__)
        found.finalize()
        return [found]
