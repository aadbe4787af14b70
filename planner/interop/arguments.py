"""The arguments of another tool, from a launch script, from the arguments alone, or from a mapping.

Nothing of a script is executed. Quotes, comments, continued lines, arrays (``ARGS=( … )``,
``ARGS+=( … )``) and the expansions ``$NAME``, ``${NAME[@]}`` and ``${NAME:-default}`` are read as
bash reads them, in the order of the file. A value that depends on anything else (a substitution,
arithmetic, a branch, a loop, a function) is marked as not literal, and the formats refuse it where
it matters: what was not understood never becomes a default.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from planner.errors import PipeplanError, shorten
from planner.records.document import read_json, read_text, read_toml

MOST_SCRIPT_BYTES = 2**20
PASTE = (
    "the script computes it, or has it in a branch, a loop or a function, and is not executed; "
    "paste the arguments with their values"
)
OFF = ("false", "0", "off", "no")


class Argument(NamedTuple):
    """An argument as it was given.

    Attributes:
        name: with dots, and dashes in place of underscores; without those in front.
        value: the first word behind it, or the value of a mapping; None behind a bare option.
        more: further words behind it.
        is_literal: whether the file alone gives it; otherwise a part would have to be executed.
    """

    name: str
    value: Any = None
    more: tuple[str, ...] = ()
    is_literal: bool = True


@dataclass
class ArgumentFile:
    """The arguments of a file.

    Attributes:
        source: the file.
        given: the arguments, in order.
        problems: of those that were taken so far.
        notes: what depends on more than the file.
        words: of a script, those that are no options, their values among them.
        mapping: the contents of TOML, JSON or YAML; None of a script.
    """

    source: str
    given: list[Argument] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    mapping: Mapping[str, Any] | None = None

    def wrong(self, name: str, problem: str) -> None:
        """Note a problem of an argument.

        Args:
            name: as the tool writes it.
            problem: with its remedy.
        """
        self.problems.append(f"{self.source}: {name}: {problem}")

    def require_right(self) -> None:
        """Refuse the file if a problem was noted.

        Raises:
            PipeplanError: with every problem.
        """
        if self.problems:
            raise PipeplanError(dict.fromkeys(self.problems))


def read_arguments(path: str | Path, tool: str, switches: Collection[str]) -> ArgumentFile:
    """Read a file of arguments; nothing of it is run.

    Args:
        path: ends with .toml, .json, .yaml or .yml for a mapping; anything else is a script, or the
            arguments alone.
        tool: whose arguments, for messages.
        switches: names of options without a value.

    Raises:
        PipeplanError: if it cannot be read, a quotation is not closed, or a word may hide some.
    """
    found = ArgumentFile(str(path))
    if Path(path).suffix in _READERS:
        data = _READERS[Path(path).suffix](path)
        if not isinstance(data, Mapping):
            raise PipeplanError(f"{path}: expected a mapping of arguments to values")
        found.given += _of_mapping(data, "")
        found.mapping = data
        return found
    try:
        script = Script.of(read_text(Path(path), MOST_SCRIPT_BYTES))
    except ValueError as error:
        raise PipeplanError(f"{path}: {error}; give a file with {tool}'s arguments alone") from None
    found.notes += dict.fromkeys(script.notes)
    found.given += _of_words(found, script.words, switches)
    found.words += [word.text for word in script.words if not word.text.startswith("--")]
    return found


_OVERRIDE = re.compile(r"[+]{0,2}((?:[A-Za-z0-9_]+\.)+[A-Za-z0-9_]+)=(.*)", re.DOTALL)
"""A value as Hydra takes it, such as NeMo's ``trainer.strategy.pipeline_model_parallel_size=2``."""
_SUBSTITUTION = re.compile(r"\$\((?!\().*\)|`.*`", re.DOTALL)


def normal(name: str) -> str:
    """Return a name without dashes in front, and with dashes in place of underscores."""
    return name.lstrip("-").replace("_", "-")


def _of_words(
    found: ArgumentFile, words: Sequence[Word], switches: Collection[str]
) -> Iterator[Argument]:
    is_value = False
    for place, word in enumerate(words):
        if override := _OVERRIDE.fullmatch(word.text):
            yield Argument(normal(override[1]), override[2], is_literal=word.is_literal)
        elif word.text.startswith("--"):
            name, equals, value = word.text.partition("=")
            name = normal(name)
            behind = takewhile(lambda more: not more.text.startswith("--"), words[place + 1 :])
            values = [Word(value)] if equals else list(behind)
            is_value = not equals and name not in switches
            taken = values[: 0 if name in switches and not equals else None]
            yield Argument(
                name,
                values[0].text if values else None,
                tuple(more.text for more in values[1:]),
                word.is_literal and all(more.is_literal for more in taken[:1]),
            )
        elif is_value:
            is_value = False
        elif _SUBSTITUTION.fullmatch(word.text):
            raise PipeplanError(f"{found.source}: {shorten(word.text)}: {PASTE}")
        elif word.text.startswith("$") and not word.is_literal:
            found.notes.append(f"{shorten(word.text)} is not set in the file: taken as empty")


def _of_mapping(data: Mapping[Any, Any], around: str) -> Iterator[Argument]:
    for key, value in data.items():
        name = f"{around}{normal(str(key))}"
        if isinstance(value, Mapping):
            yield from _of_mapping(value, f"{name}.")
        else:
            yield Argument(name, value, is_literal="$" not in str(value))


class _PlainYaml(yaml.SafeLoader):  # type: ignore[misc]
    """A loader without anchors, by which a small file can stand for an endless one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it refers to an anchor; write the values out")
        return super().compose_node(parent, index)


def _read_yaml(path: str | Path) -> Any:
    try:
        return yaml.load(read_text(Path(path), MOST_SCRIPT_BYTES), _PlainYaml)
    except (yaml.YAMLError, RecursionError) as error:
        raise PipeplanError(f"{path}: {shorten(str(error), 200)}; expected YAML") from None


_READERS = {".toml": read_toml, ".json": read_json, ".yaml": _read_yaml, ".yml": _read_yaml}


# --- scripts --------------------------------------------------------------------------------------


class Word(NamedTuple):
    """A word of a command after quotes and expansions, and whether the file alone gives it."""

    text: str
    is_literal: bool = True


_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*\n).*?(?:\n\s*\2(?=\n|$)|$)", re.DOTALL)
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_PIECE = re.compile(
    rf"""(?P<single>'[^']*')|(?P<escape>\\.)|(?P<computed>\${_PARENTHESES}|`[^`]*`)
    |(?P<double>"(?:\\.|\${_PARENTHESES}|[^"\\])*")|(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<bar>(?<=[^\s|])\|(?=[^\s|]))""",
    re.VERBOSE | re.DOTALL,
)
_OPERATORS = ";&|()<>\n"
_HIDDEN = str.maketrans("$()|", "\0\1\2\3")
"""Characters that are no operators where they are."""
_HIDDEN_PARENTHESES = str.maketrans("()", "\1\2")
_SHOWN = dict(enumerate("$()|"))
_COMPUTED = "$" + "(…)".translate(_HIDDEN_PARENTHESES)
_Item = str | tuple[str, list[str]]
"""A word, or an assignment with the words of an array."""
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?:\[[@*0]\])?(?::?[-=]([^}$`]*))?\}")
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_OPEN = frozenset("if for while until case select {".split())
_CLOSE = frozenset("fi done esac }".split())
_SKIPPED = frozenset("then else elif do ! time export declare local readonly typeset".split())


@dataclass
class Script:
    """The words of a script's commands, by its literal assignments; read statement by statement.

    Attributes:
        commands: words of all commands that have options, in order.
        values: of each variable, one string or the words of an array. What was not understood
            stands for itself, such as ``$NAME``.
        notes: what depends on more than the file.
    """

    commands: list[Word] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _depth: int = 0

    @classmethod
    def of(cls, text: str) -> Script:
        """Read a script.

        Raises:
            ValueError: if a quotation or parenthesis is not closed.
        """
        script = cls()
        plain = _HEREDOC.sub(r"\3", text.replace("\r\n", "\n")).replace("\\\n", " ")
        text = _PIECE.sub(_without_meaning, plain)
        lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
        before, statement = "\n", list[_Item]()
        array: list[str] | None = None
        for token in [*lexer, "\n"]:
            if token.strip(_OPERATORS):
                (statement if array is None else array).append(token)
                continue
            for operator in re.findall(r"&&|\|\||.|\n", token):
                if array is not None and operator == ")":
                    statement[-1] = (str(statement[-1]), array)
                    array = None
                elif operator == "(" and statement and str(statement[-1]).endswith("="):
                    array = []
                elif array is None:
                    script._take(statement, is_conditional=before in ("&&", "||"))
                    before, statement = operator, []
        if array is not None:
            raise ValueError("No closing )")
        return script

    @property
    def words(self) -> list[Word]:
        """Words of the commands, and of all variables where no command has an option."""
        if any(word.text.startswith("--") for word in self.commands):
            return self.commands
        rows = [word for row in self.values.values() for word in _split(row)]
        return [*self.commands, *map(_word, rows)]

    def _take(self, words: Sequence[_Item], *, is_conditional: bool) -> None:
        while words and (name := str(words[0])) in _OPEN | _CLOSE | _SKIPPED:
            self._depth += (name in _OPEN) - (name in _CLOSE and self._depth > 0)
            if name in ("for", "select") and len(words) > 1:
                self.values[str(words[1])] = [f"${words[1]}"]
                return
            words = words[1:]
        given = list(takewhile(_assigned, words))
        if len(given) == len(words):
            for item in given:
                self._assign(item, is_sure=self._depth == 0 and not is_conditional)
        expanded = self._expanded(str(word) for word in words[len(given) :])
        if any("--" in word or "=" in word for word in expanded):
            rows = map(_word, expanded)
            self.commands += [Word(text, ok and self._depth == 0) for text, ok in rows]

    def _assign(self, item: _Item, *, is_sure: bool) -> None:
        found = _assigned(item)
        assert found is not None
        name, is_more, text = found.groups()
        new = self._expanded(item[1]) if isinstance(item, tuple) else [self._joined(text)]
        new = new if is_sure else [f"${name}"]
        self.values[name] = [*self.values.get(name, ()), *new] if is_more else new

    def _expanded(self, words: Iterable[str]) -> list[str]:
        rows = []
        for word in words:
            whole = _VARIABLE.fullmatch(word)
            rows += self._value(whole) if whole else [self._joined(word)]
        return _split(rows)

    def _joined(self, text: str) -> str:
        """Return a word as one string, in which an array is its words with spaces between."""
        return _VARIABLE.sub(lambda found: " ".join(self._value(found)), text)

    def _value(self, found: re.Match[str]) -> list[str]:
        name, default = found[1] or found[2], found[3]
        if name in self.values:
            return self.values[name]
        if default is None:
            return [found[0]]
        self.notes.append(f"{name} is {default or 'empty'} unless the environment sets it")
        return [default]


def _without_meaning(found: re.Match[str]) -> str:
    """Return a piece of a script with characters hidden that bash would not read as operators."""
    kind, text = found.lastgroup, found[0]
    if kind == "comment":
        return ""
    if kind == "computed":
        return _COMPUTED
    if kind == "double":
        text = re.sub(rf"\${_PARENTHESES}|`[^`]*`", _COMPUTED, text)
        return text.replace("\\$", "\0").translate(_HIDDEN_PARENTHESES)
    return text.translate(_HIDDEN)


def _assigned(item: _Item) -> re.Match[str] | None:
    """Return the name, a plus and the text of an assignment."""
    return _ASSIGNMENT.fullmatch(item[0] if isinstance(item, tuple) else item)


def _word(text: str) -> Word:
    return Word(text.translate(_SHOWN), "$" not in text)


def _split(rows: Iterable[str]) -> list[str]:
    """Return the words of strings that hold options, as ``eval`` or an unquoted variable does."""
    found: list[str] = []
    for text in map(str.strip, rows):
        if not re.search(r"\s", text) or "--" not in text:
            found += [text] if text else []
            continue
        try:
            found += shlex.split(text)
        except ValueError:
            found += text.split()
    return found
