"""The words of a shell script's commands, by its literal assignments; nothing of it is run.

Quotes, comments, continued lines, arrays (``ARGS=( … )``, ``ARGS+=( … )``) and the expansions
``$NAME``, ``${NAME[@]}`` and ``${NAME:-default}`` are read as bash reads them, in the order of the
file. Whatever depends on more than that is kept as it stands and marked: command substitution,
arithmetic, and everything that is assigned or written in a branch, a loop or a function.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Word(NamedTuple):
    """A word of a command.

    Attributes:
        text: after quotes and expansions.
        is_literal: whether the file alone says it; otherwise a part would have to be executed.
    """

    text: str
    is_literal: bool = True


class _Piece(NamedTuple):
    """A part of a word before expansion."""

    text: str
    is_expansion: bool = False
    is_quoted: bool = False


_OPERATOR = re.compile(r"&&|\|\||;;&?|;|&>>?|[0-9]*[<>]+[&|]?[0-9-]*|[&|()\n]")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*\n).*?(?:\n\s*\2(?=\n|$)|$)", re.DOTALL)
_BARE = re.compile(r"[^\s'\"\\;&|()<>`$]+|(?<=\S)\|(?=[^\s|&])")
_QUOTATION = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_OPEN = frozenset("if for while until case select {".split())
_CLOSE = frozenset("fi done esac }".split())
_BETWEEN = frozenset("then else elif do ! time".split())
_ASSIGNERS = frozenset("export declare local readonly typeset".split())
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=")
_PARAMETER = re.compile(r"\$\{?(\w+|[@*])(?:\[[@*0]\])?(?::?(-|=)(.*?))?\}?", re.DOTALL)


@dataclass
class ShellWords:
    """What a script says, statement by statement.

    Attributes:
        commands: words of all commands that have options, in order.
        values: of each variable, a word for a string and several for an array.
        notes: what depends on more than the file.
    """

    commands: list[Word] = field(default_factory=list)
    values: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _depth: int = 0

    @classmethod
    def of(cls, text: str) -> ShellWords:
        """Read a script.

        Raises:
            ValueError: if a quotation or parenthesis is not closed.
        """
        script = cls()
        text = _HEREDOC.sub(lambda found: found[3], text.replace("\r\n", "\n"))
        statement: list[list[_Piece]] = []
        before = "\n"
        for token in _tokens(text):
            if isinstance(token, list):
                statement.append(token)
            elif token not in ("(", ")") or statement:
                script._take(statement, is_conditional=before in ("&&", "||"))
                statement, before = [], token
        script._take(statement, is_conditional=before in ("&&", "||"))
        return script

    @property
    def words(self) -> list[Word]:
        """Words of the commands, and of all variables where no command has an option."""
        if any(word.text.startswith("--") for word in self.commands):
            return self.commands
        held = (word for value in self.values.values() for word in _split(value))
        return [*self.commands, *held]

    def _take(self, statement: list[list[_Piece]], *, is_conditional: bool) -> None:
        while statement and (word := "".join(piece.text for piece in statement[0])) in (
            *_OPEN, *_CLOSE, *_BETWEEN, *_ASSIGNERS
        ):  # fmt: skip
            self._depth += (word in _OPEN) - (word in _CLOSE and self._depth > 0)
            if word in ("for", "select") and len(statement) > 1:
                self.values[statement[1][0].text] = (Word(f"${statement[1][0].text}", False),)
                return
            statement = statement[1:]
        is_sure = self._depth == 0 and not is_conditional
        assigned = 0
        while assigned < len(statement) and (found := _assignment(statement[assigned])):
            assigned += 1
            if assigned == len(statement) or _assignment(statement[assigned]):
                self._assign(*found, is_sure=is_sure)
        words = list(self._expanded(statement[assigned:], is_sure=self._depth == 0))
        if any("--" in word.text or "=" in word.text for word in words):
            self.commands += words

    def _assign(self, name: str, is_more: bool, pieces: list[_Piece], *, is_sure: bool) -> None:
        if pieces and pieces[0] == _Piece("("):
            rows = _words_of_array(pieces)
            new = tuple(self._expanded(rows, is_sure=is_sure))
        else:
            new = (self._joined(pieces, is_sure=is_sure),)
        self.values[name] = (*self.values.get(name, ()), *new) if is_more else new

    def _expanded(self, rows: Sequence[list[_Piece]], *, is_sure: bool) -> Iterator[Word]:
        """Yield the words that a statement's words expand to."""
        for pieces in rows:
            if len(pieces) == 1 and pieces[0].is_expansion:
                found = self._value(pieces[0])
                several = not pieces[0].is_quoted or len(found) > 1
                words = _split(found) if several else list(found)
            else:
                words = _split([self._joined(pieces, is_sure=True)])
            yield from (Word(text, literal and is_sure) for text, literal in words)

    def _joined(self, pieces: Sequence[_Piece], *, is_sure: bool) -> Word:
        """Return the string of pieces, in which an array is its words with spaces between."""
        rows = [self._value(piece) for piece in pieces]
        is_literal = is_sure and all(word.is_literal for row in rows for word in row)
        return Word("".join(" ".join(word.text for word in row) for row in rows), is_literal)

    def _value(self, piece: _Piece) -> tuple[Word, ...]:
        if not piece.is_expansion:
            return (Word(piece.text),)
        found = _PARAMETER.fullmatch(piece.text)
        if found is None:
            return (Word(piece.text, False),)
        name, _, default = found.groups()
        if name in self.values:
            return self.values[name]
        if default is None or "$" in default or "`" in default:
            return (Word(piece.text, False),)
        self.notes.append(f"{name} is {default or 'empty'} unless the environment sets it")
        return (Word(default.strip("'\"")),)


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


def _assignment(pieces: list[_Piece]) -> tuple[str, bool, list[_Piece]] | None:
    """Return the name of ``NAME=value``, whether it is appended, and the value's pieces."""
    first = pieces[0]
    found = None if first.is_quoted or first.is_expansion else _ASSIGNMENT.match(first.text)
    if found is None:
        return None
    rest = [first._replace(text=first.text[found.end() :])] if first.text[found.end() :] else []
    return found[1], bool(found[2]), [*rest, *pieces[1:]]


def _words_of_array(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Return the words between the parentheses of an array, which the lexer left in one piece."""
    return [token for token in _tokens(pieces[1].text) if isinstance(token, list)]


def _tokens(text: str) -> Iterator[list[_Piece] | str]:
    """Yield words as pieces, and operators."""
    at, word = 0, list[_Piece]()
    while at < len(text):
        character = text[at]
        if character in " \t\r" or text.startswith("\\\n", at):
            if word:
                yield word
            word, at = [], at + (2 if character == "\\" else 1)
        elif character == "#" and not word:
            at = len(text) if (end := text.find("\n", at)) < 0 else end
        elif character == "(" and word and word[-1].text.endswith("="):
            end = _closing(text, at)
            word += [_Piece("("), _Piece(text[at + 1 : end - 1])]
            at = end
        elif found := _BARE.match(text, at):
            word.append(_Piece(found[0]))
            at = found.end()
        elif found := _OPERATOR.match(text, at):
            if word:
                yield word
            yield found[0]
            word, at = [], found.end()
        else:
            pieces, at = _quoted(text, at)
            word += pieces
    if word:
        yield word


def _quoted(text: str, at: int) -> tuple[list[_Piece], int]:
    """Return the pieces of a quotation, an escape or an expansion, and where it ends."""
    character = text[at]
    if character == "\\":
        return [_Piece(text[at + 1 : at + 2])], at + 2
    if character == "'":
        end = text.find("'", at + 1)
        if end < 0:
            raise ValueError("No closing quotation")
        return [_Piece(text[at + 1 : end], is_quoted=True)], end + 1
    if character != '"':
        end = _end_of_expansion(text, at)
        return [_Piece(text[at:end], is_expansion=end > at + 1)], end
    pieces, at = [_Piece("", is_quoted=True)], at + 1
    while at < len(text) and text[at] != '"':
        if text[at] in "$`":
            end = _end_of_expansion(text, at)
            pieces.append(_Piece(text[at:end], end > at + 1, is_quoted=True))
        else:
            is_escape = text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n")
            end = at + 1 + is_escape
            taken = text[at + is_escape : end].replace("\n", " ") if is_escape else text[at]
            pieces.append(_Piece(taken, is_quoted=True))
        at = end
    if at >= len(text):
        raise ValueError("No closing quotation")
    merged = [piece for piece in pieces if piece.text]
    return merged or pieces[:1], at + 1


def _end_of_expansion(text: str, at: int) -> int:
    """Return where the expansion at ``$`` or a backquote ends."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        if end < 0:
            raise ValueError("No closing backquote")
        return end + 1
    if text[at + 1 : at + 2] in ("(", "{"):
        return _closing(text, at + 1)
    found = re.compile(r"\w+|[@*#?!$-]").match(text, at + 1)
    return found.end() if found else at + 1


def _closing(text: str, at: int) -> int:
    """Return where the parenthesis or brace ends that opens here; quotations are passed over."""
    pairs = {"(": ")", "{": "}"}
    opened = [pairs[text[at]]]
    at += 1
    while at < len(text) and opened:
        character = text[at]
        if character == "\\":
            at += 1
        elif found := _QUOTATION.match(text, at):
            at = found.end() - 1
        elif character == "#" and text[at - 1].isspace():
            at = len(text) if (end := text.find("\n", at)) < 0 else end
            continue
        elif character == opened[-1]:
            opened.pop()
        elif character in pairs and opened[-1] != "}":
            opened.append(pairs[character])
        at += 1
    if opened:
        raise ValueError(f"No closing {opened[-1]}")
    return at
