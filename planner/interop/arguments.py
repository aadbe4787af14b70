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
from collections.abc import Collection, Iterator, Mapping, Sequence
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


_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_EXPANSION = rf"\${_PARENTHESES}|`[^`]*`|\$\{{[^}}]*\}}|\$(?:\w+|[@*#?!$-])"
_TOKEN = re.compile(
    rf"""(?P<space>[ \t\r]+|\\\n|(?<!\S)\#[^\n]*)
    |(?P<single>'[^']*')
    |(?P<double>"(?:\\.|{_EXPANSION}|[^"\\])*")
    |(?P<expansion>{_EXPANSION})
    |(?P<escape>\\.)
    |(?P<operator>&&|\|\||;;|&>>?|[0-9]*[<>]+[&|]?[0-9-]*|[;&()\n]|\|)
    |(?P<plain>[^\s'"\\;&|()<>`$]+(?:\|[^\s'"\\;&|()<>`$]+)*|.)""",
    re.VERBOSE | re.DOTALL,
)
_IN_QUOTES = re.compile(rf'(?P<expansion>{_EXPANSION})|\\([$`"\\])|\\\n', re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*\n).*?(?:\n\s*\2(?=\n|$)|$)", re.DOTALL)
_OPEN = frozenset("if for while until case select {".split())
_CLOSE = frozenset("fi done esac }".split())
_SKIPPED = frozenset("then else elif do ! time export declare local readonly typeset".split())
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\$\{?(\w+|[@*])(?:\[[@*0]\])?(?::?[-=](.*?))?\}?", re.DOTALL)


class _Piece(NamedTuple):
    """A part of a word: literal text, or an expansion, in double quotes or outside."""

    text: str
    is_expansion: bool = False
    is_quoted: bool = False


@dataclass
class _Word:
    """A word before expansion; of ``NAME=( … )`` the words in parentheses as ``array``."""

    pieces: list[_Piece] = field(default_factory=list)
    array: list[_Word] | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def assigned(self) -> re.Match[str] | None:
        """The name, a plus and the first piece's rest of an assignment."""
        is_plain = self.pieces and not (self.pieces[0].is_quoted or self.pieces[0].is_expansion)
        return _ASSIGNMENT.fullmatch(self.pieces[0].text) if is_plain else None


@dataclass
class Script:
    """What a script says, statement by statement.

    Attributes:
        commands: words of all commands that have options, in order.
        values: of each variable, a word for a string and several for an array.
        notes: what depends on more than the file.
    """

    commands: list[Word] = field(default_factory=list)
    values: dict[str, list[Word]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _depth: int = 0

    @classmethod
    def of(cls, text: str) -> Script:
        """Read a script.

        Raises:
            ValueError: if a quotation or parenthesis is not closed.
        """
        script = cls()
        for before, words in _statements(_HEREDOC.sub(r"\3", text.replace("\r\n", "\n"))):
            script._take(words, is_conditional=before in ("&&", "||"))
        return script

    @property
    def words(self) -> list[Word]:
        """Words of the commands, and of all variables where no command has an option."""
        if any(word.text.startswith("--") for word in self.commands):
            return self.commands
        return [*self.commands, *(word for row in self.values.values() for word in _split(row))]

    def _take(self, words: list[_Word], *, is_conditional: bool) -> None:
        while words and (name := words[0].text) in _OPEN | _CLOSE | _SKIPPED:
            self._depth += (name in _OPEN) - (name in _CLOSE and self._depth > 0)
            if name in ("for", "select") and len(words) > 1:
                self.values[words[1].text] = [Word(f"${words[1].text}", False)]
                return
            words = words[1:]
        assignments = list(takewhile(lambda word: word.assigned, words))
        if len(assignments) == len(words):
            for word in assignments:
                self._assign(word, is_sure=self._depth == 0 and not is_conditional)
        rest = self._expanded(words[len(assignments) :])
        expanded = [Word(text, is_literal and self._depth == 0) for text, is_literal in rest]
        if any("--" in word.text or "=" in word.text for word in expanded):
            self.commands += expanded

    def _assign(self, word: _Word, *, is_sure: bool) -> None:
        found = word.assigned
        assert found is not None
        name, is_more, first = found.groups()
        value = _Word([word.pieces[0]._replace(text=first), *word.pieces[1:]])
        new = [self._joined(value)] if word.array is None else list(self._expanded(word.array))
        new = [Word(text, is_literal and is_sure) for text, is_literal in new]
        self.values[name] = [*self.values.get(name, ()), *new] if is_more else new

    def _expanded(self, words: Sequence[_Word]) -> Iterator[Word]:
        for word in words:
            piece = word.pieces[0] if len(word.pieces) == 1 else _Piece("")
            found = self._value(piece) if piece.is_expansion else [self._joined(word)]
            is_one = piece.is_expansion and piece.is_quoted and len(found) == 1
            yield from found if is_one else _split(found)

    def _joined(self, word: _Word) -> Word:
        """Return a word as one string, in which an array is its words with spaces between."""
        rows = [self._value(piece) for piece in word.pieces]
        text = "".join(" ".join(part.text for part in row) for row in rows)
        return Word(text, all(part.is_literal for row in rows for part in row))

    def _value(self, piece: _Piece) -> list[Word]:
        found = _PARAMETER.fullmatch(piece.text) if piece.is_expansion else None
        if found is None:
            return [Word(piece.text, not piece.is_expansion)]
        name, default = found.groups()
        if name in self.values:
            return self.values[name]
        if default is None or "$" in default or "`" in default:
            return [Word(piece.text, False)]
        self.notes.append(f"{name} is {default or 'empty'} unless the environment sets it")
        return [Word(default.strip("'\""))]


def _split(value: Sequence[Word]) -> list[Word]:
    """Return the words of strings that hold options, as ``eval`` or an unquoted variable does."""
    found: list[Word] = []
    for text, is_literal in value:
        if not re.search(r"\s", text.strip()) or "--" not in text:
            found += [Word(text.strip(), is_literal)] if text.strip() else []
            continue
        try:
            parts = shlex.split(text, comments=False)
        except ValueError:
            parts = text.split()
        found += [Word(part, is_literal and "$" not in part) for part in parts]
    return found


def _statements(text: str) -> Iterator[tuple[str, list[_Word]]]:
    """Yield each statement, with the operator before it."""
    before, words, array, word = "\n", list[_Word](), None, _Word()
    for found in _TOKEN.finditer(text + "\n"):
        kind, token = found.lastgroup, found[0]
        if token == "(" and word.text.endswith("=") and array is None:
            array = word.array = []
            words.append(word)
            word = _Word()
        elif kind in ("space", "operator"):
            if word.pieces:
                (words if array is None else array).append(word)
                word = _Word()
            if array is not None:
                array = None if token == ")" else array
            elif kind == "operator" and (token not in "()" or words):
                yield before, words
                before, words = token, []
        elif kind == "plain" and token in ("'", '"', "`"):
            raise ValueError("No closing quotation")
        else:
            word.pieces += _pieces(kind or "", token)
    if array is not None:
        raise ValueError("No closing )")


def _pieces(kind: str, token: str) -> list[_Piece]:
    if kind == "single":
        return [_Piece(token[1:-1], is_quoted=True)]
    if kind == "escape":
        return [_Piece(token[1:])]
    if kind != "double":
        return [_Piece(token, is_expansion=kind == "expansion")]
    pieces, end = list[_Piece](), 1
    for found in _IN_QUOTES.finditer(token, 1, len(token) - 1):
        pieces.append(_Piece(token[end : found.start()], is_quoted=True))
        inside = found[1] or found[2] or " "
        pieces.append(_Piece(inside, is_expansion=bool(found[1]), is_quoted=True))
        end = found.end()
    pieces.append(_Piece(token[end:-1], is_quoted=True))
    return [piece for piece in pieces if piece.text] or pieces[:1]
