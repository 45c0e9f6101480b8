"""The grammar engine's EBNF dialect: parse, refuse what cannot work, recognise text independently by Lark's Earley.

``name ::= "literal" [a-z] (group | other)* other{2,5} # comment``; the start rule is ``root``. Knows no tokens.
"""

import re
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from schemas.errors import ConstraintError
from schemas.regex import MAX_REPEAT, Ranges, complement, union

MAX_SOURCE_CHARS = 500_000
ROOT = "root"


@dataclass(frozen=True)
class Ref:
    """The rule of that name."""

    name: str


Symbol = Ranges | Ref
Grammar = dict[str, list[tuple[Symbol, ...]]]
"""Plain productions: each rule's alternatives, each a row of character sets and rule names."""

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<define>::=)|(?P<name>[A-Za-z_][A-Za-z0-9_.\-]*)|(?P<string>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<class>\[(?:[^\]\\\n]|\\.)*\])|(?P<bounds>\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<mark>[()|*+?=,])""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "e": "\x1b"}


def parse_ebnf(source: str) -> Grammar:
    """Parse and check a grammar. Raises ConstraintError that names line or rule and what to change."""
    if not source.strip():
        raise ConstraintError('the EBNF grammar is empty: write at least `root ::= "yes" | "no"`')
    if len(source) > MAX_SOURCE_CHARS:
        raise ConstraintError(f"the EBNF grammar has {len(source)} characters, limit {MAX_SOURCE_CHARS}")
    try:
        grammar = _Parser(source).grammar()
    except RecursionError as error:
        raise ConstraintError("the EBNF grammar is nested too deeply: name inner groups as rules") from error
    _check(grammar)
    return grammar


class _Parser:
    """Recursive descent over the tokens; groups and repetitions become rules of their own, named with a space."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = list(self._tokens())
        self.position = 0
        self.rules: Grammar = {}
        self.exact: dict[tuple[tuple[Symbol, ...], int], Ref] = {}
        self.at_most: dict[tuple[tuple[Symbol, ...], int], Ref] = {}
        self.num_inner = 0

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        position = 0
        while position < len(self.source):
            found = _TOKEN.match(self.source, position)
            if found is None:
                self.fail(position, f"cannot read {self.source[position : position + 12]!r}")
            assert found is not None
            if found.lastgroup != "space":
                yield found.lastgroup or "", found[0], position
            position = found.end()

    def fail(self, position: int, what: str) -> None:
        line = self.source.count("\n", 0, position) + 1
        column = position - self.source.rfind("\n", 0, position)
        raise ConstraintError(f"EBNF grammar, line {line}, column {column}: {what}")

    def peek(self, ahead: int = 0) -> tuple[str, str, int]:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else ("end", "", len(self.source))

    def grammar(self) -> Grammar:
        while self.peek()[0] != "end":
            kind, name, position = self.peek()
            if kind != "name" or self.peek(1)[0] != "define":
                self.fail(position, f"expected `rule ::= ...`, found {name!r}")
            if name in self.rules:
                self.fail(position, f"the rule {name!r} is defined twice: rename or join them with |")
            self.position += 2
            self.rules[name] = []
            self.rules[name] = self.alternatives()
        return self.rules

    def alternatives(self) -> list[tuple[Symbol, ...]]:
        options = [self.sequence()]
        while self.peek()[1] == "|" and self.peek()[0] == "mark":
            self.position += 1
            options.append(self.sequence())
        return options

    def sequence(self) -> tuple[Symbol, ...]:
        symbols: list[Symbol] = []
        start = self.position
        while True:
            kind, text, position = self.peek()
            if kind == "end" or (kind == "mark" and text in "|)") or self.peek(1)[0] == "define":
                break
            symbols += self.quantified(kind, text, position)
        if self.position == start:
            self.fail(self.peek()[2], 'an empty alternative: write "" for the empty text')
        return tuple(symbols)

    def quantified(self, kind: str, text: str, position: int) -> tuple[Symbol, ...]:
        item = self.atom(kind, text, position)
        kind, text, position = self.peek()
        if kind == "bounds":
            low, _, high = text[1:-1].replace(" ", "").partition(",")
            bounds = (int(low), int(high) if high else None if "," in text else int(low))
        elif kind == "mark" and text in "*+?":
            bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
        else:
            return item
        self.position += 1
        if max(bounds[0], bounds[1] or 0) > MAX_REPEAT:
            self.fail(position, f"a repetition above the limit of {MAX_REPEAT}: lower it")
        if bounds[1] is not None and bounds[1] < bounds[0]:
            self.fail(position, "a repetition with its bounds swapped")
        return self.repeat(item, *bounds)

    def repeat(self, item: tuple[Symbol, ...], low: int, high: int | None) -> tuple[Symbol, ...]:
        if high is not None:
            return self.times(item, low) + self.up_to(item, high - low)
        rest = self.inner([()])
        self.rules[rest.name] = [(), (rest, *item)]  # recursive on the left: only the last item is ever open
        return (*self.times(item, low), rest)

    def times(self, item: tuple[Symbol, ...], count: int) -> tuple[Symbol, ...]:
        """In halves, so that large counts take few rules and few open items."""
        if count <= 3:
            return item * count
        if (item, count) not in self.exact:
            half = count // 2
            self.exact[item, count] = self.inner([self.times(item, half) + self.times(item, count - half)])
        return (self.exact[item, count],)

    def up_to(self, item: tuple[Symbol, ...], count: int) -> tuple[Symbol, ...]:
        """Either less than half, or half and the rest: one derivation for each length."""
        if count == 0:
            return ()
        if (item, count) not in self.at_most:
            half = count - count // 2
            more = self.times(item, half) + self.up_to(item, count - half)
            self.at_most[item, count] = self.inner([self.up_to(item, half - 1), more])
        return (self.at_most[item, count],)

    def inner(self, options: list[tuple[Symbol, ...]]) -> Ref:
        self.num_inner += 1
        name = f"inner {self.num_inner}"
        self.rules[name] = options
        return Ref(name)

    def atom(self, kind: str, text: str, position: int) -> tuple[Symbol, ...]:
        self.position += 1
        if kind == "string":
            return tuple(((ord(char), ord(char)),) for char, _ in self.characters(text[1:-1], position))
        if kind == "class":
            return (self.char_class(text[1:-1], position),)
        if kind == "name":
            if self.peek()[1] == "(" and self.peek()[2] == position + len(text):
                self.fail(
                    position, f"{text}(...) is an extension of the grammar engine that cannot be checked: spell it out"
                )
            return (Ref(text),)
        if text == "(":
            if self.peek()[1] == "=":
                self.fail(position, "a look-ahead cannot be checked: remove it")
            options = self.alternatives()
            if self.peek()[1] != ")":
                self.fail(position, "this ( is not closed")
            self.position += 1
            return options[0] if len(options) == 1 else (self.inner(options),)
        self.fail(position, f"unexpected {text!r}")
        return ()

    def characters(self, body: str, position: int) -> Iterator[tuple[str, bool]]:
        """The characters of a literal or class, and whether each was escaped."""
        index = 0
        while index < len(body):
            char = body[index]
            index += 1
            if char != "\\":
                yield char, False
                continue
            char = body[index]
            index += 1
            if char in "xuU":
                width = {"x": 2, "u": 4, "U": 8}[char]
                digits = body[index : index + width]
                if not re.fullmatch(r"[0-9A-Fa-f]+", digits) or len(digits) != width:
                    self.fail(position, f"\\{char} needs {width} hexadecimal digits")
                if char == "x" and re.match(r"[0-9A-Fa-f]", body[index + width :]):
                    self.fail(position, "the grammar engine reads all hexadecimal digits after \\x: write \\u00HH")
                index += width
                char = chr(int(digits, 16))
            elif char in _ESCAPES:
                char = _ESCAPES[char]
            elif char not in "\\\"'?-]^/[":
                self.fail(position, f"unknown escape \\{char}")
            yield char, True

    def char_class(self, body: str, position: int) -> Ranges:
        is_negated = body.startswith("^")
        chars = list(self.characters(body[is_negated:], position))
        ranges: list[tuple[int, int]] = []
        index = 0
        while index < len(chars):
            low = ord(chars[index][0])
            high = low
            if index + 2 < len(chars) and chars[index + 1] == ("-", False):
                high = ord(chars[index + 2][0])
                index += 2
                if high < low:
                    self.fail(position, "a character range with its ends swapped")
            ranges.append((low, high))
            index += 1
        if not ranges:
            self.fail(position, "an empty character class")
        return complement(tuple(ranges)) if is_negated else union(ranges)


def _check(grammar: Grammar) -> None:
    if ROOT not in grammar:
        raise ConstraintError("the EBNF grammar has no rule `root`: name its start rule so")
    for name, options in grammar.items():
        for symbol in (symbol for option in options for symbol in option):
            if isinstance(symbol, Ref) and symbol.name not in grammar:
                where = name if " " not in name else "a group"
                raise ConstraintError(f"the EBNF rule {symbol.name!r}, used in {where!r}, is not defined: define it")
    productive = _fixpoint(grammar)
    if lost := [name for name in grammar if name not in productive and " " not in name]:
        raise ConstraintError(
            f"the EBNF rule {lost[0]!r} never ends: each of its alternatives leads back to it; add one that does not"
        )


def _fixpoint(grammar: Grammar) -> set[str]:
    """The rules that derive some text."""
    found: set[str] = set()
    while True:
        more = {
            name
            for name, options in grammar.items()
            if name not in found
            and any(all(s.name in found for s in option if isinstance(s, Ref)) for option in options)
        }
        if not more:
            return found
        found |= more


class Recogniser:
    """Lark's Earley parser over characters: any grammar will do, at cubic time at worst. Threads may share it."""

    def __init__(self, grammar: Grammar) -> None:
        from lark import Lark  # a tenth of a second that a submit does not need

        source, start = _lark_grammar(_one_sided(grammar))
        self._parser = Lark(source, start=start, parser="earley", lexer="dynamic", ambiguity="forest")  # builds no tree

    def first_error(self, text: str) -> int | None:
        """None if the grammar derives ``text``, else where the piece begins that does not fit (its length: the end)."""
        from lark.exceptions import UnexpectedCharacters, UnexpectedEOF

        try:
            self._parser.parse(text)
        except UnexpectedCharacters as error:
            return int(error.pos_in_stream)
        except UnexpectedEOF:
            return len(text)
        return None


def _one_sided(grammar: Grammar) -> Grammar:
    """Make ``e ::= e "+" e | x`` into ``e ::= e "+" t | t`` and ``t ::= x``: the same texts, each in one way.

    Lark builds all ways to read a text, which takes cubic time.
    """
    found: Grammar = {}
    for name, options in grammar.items():
        two_sided = [option for option in options if len(option) > 1 and option[0] == option[-1] == Ref(name)]
        found[name] = options
        if two_sided:
            operand = Ref(f"operand of {name}")
            found[operand.name] = [option for option in options if option not in two_sided]
            found[name] = [(operand,), *((*option[:-1], operand) for option in two_sided)]
    return found


def _lark_grammar(grammar: Grammar) -> tuple[str, str]:
    """Print plain productions in Lark's notation; returns the start rule too.

    A terminal matches one length only, since Lark tries no other. Runs of characters are one terminal, and so are a
    rule's texts of equal length: Lark takes milliseconds to load each alternative.
    """
    rules = {name: f"rule{index}" for index, name in enumerate(grammar)}
    terminals: dict[str, str] = {}

    def terminal(regex: str) -> str:
        return terminals.setdefault(regex, f"TEXT{len(terminals)}")

    def write(option: tuple[Symbol, ...]) -> str:
        pieces: list[str] = []
        for _, run in groupby(option, key=lambda symbol: isinstance(symbol, Ref)):
            symbols = list(run)
            pieces += [rules[s.name] for s in symbols if isinstance(s, Ref)] or [terminal(_regex(symbols))]
        return " ".join(pieces)

    lines = []
    for name, options in grammar.items():
        texts: defaultdict[int, list[str]] = defaultdict(list)
        written: dict[str, None] = {}  # Lark refuses doubles
        for option in options:
            if option and not any(isinstance(symbol, Ref) for symbol in option):
                texts[len(option)].append(_regex(option))
            else:
                written[write(option)] = None
        written |= dict.fromkeys(terminal("|".join(regexes)) for regexes in texts.values())
        lines.append(f"{rules[name]}: {' | '.join(written)}")
    lines += [f"{name}: /{regex}/" for regex, name in terminals.items()]
    return "\n".join(lines), rules[ROOT]


def _regex(symbols: Iterable[Symbol]) -> str:
    return "".join(_char_regex(symbol) for symbol in symbols if not isinstance(symbol, Ref))


def _char_regex(ranges: Ranges) -> str:
    if not ranges:
        return "(?!.)."  # nothing
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _escaped(ranges[0][0])
    return "[" + "".join(f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges) + "]"


def _escaped(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\{char}" if char in string.punctuation and char not in "\"'" else f"\\U{code:08x}"
