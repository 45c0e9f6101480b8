"""Patterns of formats against jsonschema's own checks, and against what people write."""

import re

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.json_drafts import DRAFT_2020_12
from schemas.json_formats import FORMAT_PATTERNS

WRITTEN = {
    "date": ["2024-02-29", "2000-02-29", "1999-12-31"],
    "time": ["23:59:59Z", "08:30:06.283185+02:00"],
    "date-time": ["2024-02-29T12:00:00Z", "1985-04-12T23:20:50.52-07:00"],
    "duration": ["P1Y2M3D", "PT36H", "P4W", "P1DT12H"],
    "email": ["joe.bloggs+x@mail.example.com"],
    "hostname": ["www.example.com", "a-b.c"],
    "ipv4": ["192.168.0.1", "255.255.255.255"],
    "ipv6": ["::1", "2001:db8::8a2e:370:7334", "::ffff:192.0.2.1", "fe80::"],
    "uri": ["https://user@example.com:8080/a/b%20c?d=e&f#g", "mailto:a@b.c", "urn:isbn:0451450523", "file:///etc/x"],
    "uri-reference": ["/a/b", "#x", "../c?d", "https://a.b"],
    "uri-template": ["https://a.b/{id}/x{?q,lang}", "/x"],
    "uuid": ["123E4567-e89b-12d3-a456-426614174000"],
    "json-pointer": ["", "/a/~0~1/0"],
    "relative-json-pointer": ["0", "1/a", "2#"],
}


@pytest.mark.parametrize("name", FORMAT_PATTERNS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_a_pattern_matches_only_what_the_check_accepts(name: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(FORMAT_PATTERNS[name], fullmatch=True))
    assert DRAFT_2020_12.FORMAT_CHECKER.conforms(text, name), text


@pytest.mark.parametrize("name", WRITTEN)
def test_a_pattern_matches_what_people_write(name: str) -> None:
    assert [text for text in WRITTEN[name] if not re.fullmatch(FORMAT_PATTERNS[name], text)] == []
    assert [text for text in WRITTEN[name] if not DRAFT_2020_12.FORMAT_CHECKER.conforms(text, name)] == []


LAX = {
    "regex": ["a}", "a]b", "(?i)a", "(?P<n>a)", "a++", "(?#x)", r"\a", r"\Z"],
    "email": ["a@[IPv6::]", "a@[17..0.1]", "a@x.n2--a"],
    "idn-email": ["é@1。", "a@٣c", "a@é."],
    "hostname": ["xn--a", "n2--a"],
    "idn-hostname": ["a。"],
    "uri-template": ["{a,}", "{x&}", "{x/3}", "{x.*}"],
    "uuid": ["123e456٣-e89b-12d3-a456-426614174000", "123e4567-e89b-12d3-a456-_26614174000"],
    "relative-json-pointer": ["2٣", "1٣0/x"],
}


@pytest.mark.parametrize("name", LAX)
def test_what_a_second_validator_refuses_is_refused(name: str) -> None:
    oracle = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    assert [text for text in LAX[name] if oracle.is_valid(text)] == []
    assert [text for text in LAX[name] if DRAFT_2020_12.FORMAT_CHECKER.conforms(text, name)] == []


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("regex", [r"^(?!a)[\w.-]+@(b|c){1,3}$", r"\d+(?:\.\d*)?", r"[^\]]\u0041*?"]),
        ("hostname", ["xn--4gbwdl.xn--wgbh1c", "a--b.c"]),
        ("email", ["a@[127.0.0.1]", "a@xn--mnchen-3ya.de", '"a b"@c.d']),
        ("idn-email", ["é@b.c", "a@é.c"]),
        ("uri-template", ["http://a/{x:3}{?y*,z}", "{+a.b}"]),
    ],
)
def test_what_is_unusual_but_right_is_accepted(name: str, texts: list[str]) -> None:
    assert [text for text in texts if not DRAFT_2020_12.FORMAT_CHECKER.conforms(text, name)] == []
