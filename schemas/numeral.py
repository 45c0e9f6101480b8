"""Numbers within bounds, digit by digit, as the grammar engines write them: no exponent, no leading zero.

Knows no JSON Schema; an unbounded number is no numeral but a plain tree.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

MAX_DIGITS = 40
"""Digits looked for behind those that are there: bounds have fewer."""

_TEXT = re.compile(r"(-?)(0|[1-9][0-9]*|)(?:\.([0-9]*))?")


@dataclass(frozen=True)
class Bounds:
    """What a number must fit. None: no bound."""

    low: Fraction | None = None
    high: Fraction | None = None
    is_low_open: bool = False
    is_high_open: bool = False
    modulus: Fraction | None = None
    min_decimals: int = 1  # behind a point
    max_decimals: int | None = 0  # None: any number of them
    minus_zero_decimals: int | None = None  # that -0 has at least, as in -0.0; None: it is not written

    def first_within(self, low: int, high: int, num_decimals: int, sign: int) -> int | None:
        """The smallest of ``low`` to ``high`` whose value, with ``sign``, fits; the last ``num_decimals`` digits follow
        the point."""
        scale = 10**num_decimals
        lower, upper = (self.low, self.high) if sign > 0 else (_negated(self.high), _negated(self.low))
        opens = (self.is_low_open, self.is_high_open)
        is_lower_open, is_upper_open = opens if sign > 0 else opens[::-1]
        is_zero_signed = self.minus_zero_decimals is not None and num_decimals >= self.minus_zero_decimals
        if sign < 0 and not (is_zero_signed and (self.low is None or self.low < 0)):
            low = max(low, 1)
        if lower is not None:
            low = max(low, math.floor(lower * scale) + 1 if is_lower_open else math.ceil(lower * scale))
        if upper is not None:
            high = min(high, math.ceil(upper * scale) - 1 if is_upper_open else math.floor(upper * scale))
        step = 1 if self.modulus is None else (self.modulus * scale).numerator
        low = -(-low // step) * step
        return low if low <= high else None


def _negated(bound: Fraction | None) -> Fraction | None:
    return None if bound is None else -bound


@dataclass(frozen=True)
class Numeral:
    """A number of which ``text`` is written."""

    bounds: Bounds
    text: str = ""

    @property
    def longest(self) -> float:
        """Most bytes of a whole number."""
        low, high, decimals = self.bounds.low, self.bounds.high, self.bounds.max_decimals
        if low is None or high is None or decimals is None:
            return math.inf
        return max(len(str(math.floor(low))), len(str(math.ceil(high)))) + (len(".") + decimals if decimals else 0)

    def step(self, char: str) -> "Numeral | None":
        """One more digit, point or sign."""
        longer = replace(self, text=self.text + char)
        return longer if longer.shortest() is not None else None

    def shortest(self) -> str | None:
        """The fewest characters that make a number within the bounds."""
        return _shortest(self)


@lru_cache(maxsize=2**14)
def _shortest(numeral: Numeral) -> str | None:
    if numeral.text:
        return _shortest_after(numeral)
    negative = _shortest_after(replace(numeral, text="-"))
    ends = (_shortest_after(numeral), None if negative is None else "-" + negative)
    return min((end for end in ends if end is not None), key=len, default=None)


def _shortest_after(numeral: Numeral) -> str | None:
    """The same for a number whose sign is known."""
    found = _TEXT.fullmatch(numeral.text)
    if found is None:
        return None
    sign, whole, decimals = found.groups()
    for num_whole, num_decimals in _shapes(whole, decimals, numeral.bounds):
        if decimals is None:
            low, high = _values(whole, num_whole)
            low, high = low * 10**num_decimals, (high + 1) * 10**num_decimals - 1
        else:
            low, high = _values(whole + decimals, num_whole + num_decimals)
        value = numeral.bounds.first_within(low, high, num_decimals, -1 if sign else 1)
        if value is not None:
            return _print(sign, value, num_decimals)[len(numeral.text) :]
    return None


def _shapes(whole: str, decimals: str | None, bounds: Bounds) -> Iterator[tuple[int, int]]:
    """Numbers of digits before and after the point that the text may grow to, the shortest first."""
    limit = MAX_DIGITS if bounds.max_decimals is None else min(MAX_DIGITS, bounds.max_decimals)
    if decimals is not None:
        if whole:
            yield from ((len(whole), num) for num in range(max(bounds.min_decimals, len(decimals)), limit + 1))
        return
    for num_more in range(MAX_DIGITS):
        for num_whole in range(num_more + 1):
            digits, num_decimals = len(whole) + num_whole, num_more - num_whole - 1
            if digits == 0 or (whole == "0" and num_whole):
                continue
            if num_decimals == -1:
                yield digits, 0
            elif bounds.min_decimals <= num_decimals <= limit:
                yield digits, num_decimals


def _values(whole: str, num_digits: int) -> tuple[int, int]:
    """The numbers of ``num_digits`` digits that begin with ``whole``."""
    if whole:
        scale = 10 ** (num_digits - len(whole))
        return int(whole) * scale, (int(whole) + 1) * scale - 1
    return (0 if num_digits == 1 else 10 ** (num_digits - 1)), 10**num_digits - 1


def _print(sign: str, value: int, num_decimals: int) -> str:
    digits = str(value).rjust(num_decimals + 1, "0")
    return sign + (f"{digits[:-num_decimals]}.{digits[-num_decimals:]}" if num_decimals else digits)
