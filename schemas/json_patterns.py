"""The ``pattern`` of JSON Schema as ECMA-262 reads it, run by Python's ``re``.

Python differs in what ``.``, ``$`` and the shorthands match: line ends, and characters beyond ASCII. Knows no grammar.
"""

import re
from functools import lru_cache

from schemas.regex import DIGIT, ECMA_SPACE, LINE_ENDS, WORD, Ranges, complement

_SETS = {"d": DIGIT, "w": WORD, "s": ECMA_SPACE}
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_SHORTHAND = re.compile(r"\\.", re.DOTALL)


def finds(pattern: str, text: str) -> bool:
    """Whether ``pattern``, which ``re`` can compile, matches anywhere in ``text``."""
    return _compile(pattern).search(text) is not None


@lru_cache(maxsize=1024)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(_TOKEN.sub(lambda token: _for_python(token[0]), pattern), re.ASCII)


def _for_python(token: str) -> str:
    if token == "$":
        return r"\Z"
    if token == ".":
        return f"[^{_print(LINE_ENDS)}]"
    if token[0] == "[":
        return _SHORTHAND.sub(lambda escape: _members(escape[0]) or escape[0], token)
    members = _members(token)
    return f"[{members}]" if members else token


def _members(escape: str) -> str:
    """What a shorthand stands for inside of a class; nothing for other escapes."""
    name = escape[1:]
    if name.lower() not in _SETS:
        return ""
    ranges = _SETS[name.lower()]
    return _print(((0, 0), *complement(ranges)) if name.isupper() else ranges)


def _print(ranges: Ranges) -> str:
    return "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
