"""Numbers within bounds, digit by digit, against all numbers of few digits."""

import itertools
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.numeral import Bounds, Numeral

WHOLE = [str(number) for number in range(-130, 131)]
DIGITS = [*"0123456789", *map("".join, itertools.product("0123456789", repeat=2))]
DECIMAL = [f"{number}.{digits}" for number in ("-1", "-0", "0", "1", "12") for digits in DIGITS]
edges = st.one_of(st.none(), st.integers(-300, 300).map(lambda number: Fraction(number, 4)))


def is_minus_zero(num_decimals: int, bounds: Bounds) -> bool:
    is_negative = bounds.low is None or bounds.low < 0
    return is_negative and bounds.minus_zero_decimals is not None and num_decimals >= bounds.minus_zero_decimals


def fits(text: str, bounds: Bounds) -> bool:
    value = Fraction(text)
    num_decimals = len(text.partition(".")[2])
    if "." in text and not bounds.min_decimals <= num_decimals <= (bounds.max_decimals or 9):
        return False
    if value == 0 and text.startswith("-") and not is_minus_zero(num_decimals, bounds):
        return False
    if bounds.low is not None and (value < bounds.low or (value == bounds.low and bounds.is_low_open)):
        return False
    if bounds.high is not None and (value > bounds.high or (value == bounds.high and bounds.is_high_open)):
        return False
    return bounds.modulus is None or value % bounds.modulus == 0


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Bounds,
        low=edges,
        high=edges,
        is_low_open=st.booleans(),
        is_high_open=st.booleans(),
        modulus=st.sampled_from([None, Fraction(1), Fraction(7), Fraction(1, 4)]),
        max_decimals=st.sampled_from([0, 2, 6, None]),
        min_decimals=st.sampled_from([1, 2]),
        minus_zero_decimals=st.sampled_from([None, 0, 1]),
    )
)
def test_the_shortest_end_is_the_shortest_and_fits(bounds: Bounds) -> None:
    decimals = DECIMAL if bounds.max_decimals != 0 else []
    texts = [text for text in (*WHOLE, *decimals) if fits(text, bounds)]
    for prefix in ("", "-", "1", "-1", "12", "0", *(["0.", "-0.", "1.2", "12.5"] if bounds.max_decimals != 0 else [])):
        end = Numeral(bounds, prefix).shortest()
        ends = [len(text) - len(prefix) for text in texts if text.startswith(prefix)]
        if end is None:
            assert not ends
        else:
            assert fits(prefix + end, bounds)
            assert len(end) <= min(ends, default=len(end))


def test_a_numeral_takes_only_digits_that_lead_somewhere() -> None:
    numeral = Numeral(Bounds(low=Fraction(120), high=Fraction(130)))
    assert [digit for digit in "0123456789-." if numeral.step(digit)] == ["1"]
    one = numeral.step("1")
    assert one is not None
    assert [digit for digit in "0123456789-." if one.step(digit)] == ["2", "3"]
    assert one.shortest() == "20"
    assert numeral.longest == 3
