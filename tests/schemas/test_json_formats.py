"""Patterns of formats against jsonschema's own checks, and against what people write."""

import re

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
