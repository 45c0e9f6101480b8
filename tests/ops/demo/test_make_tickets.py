"""The sample tickets are varied, labelled and the ones that the script writes."""

from collections import Counter

import pyarrow.parquet as pq

from ops.demo.make_tickets import NUM_TICKETS, PATH, SITUATIONS, make_tickets


def test_the_committed_tickets_are_the_ones_the_script_writes() -> None:
    assert pq.read_table(PATH).equals(make_tickets(NUM_TICKETS))


def test_tickets_differ_and_every_placeholder_is_filled() -> None:
    texts = make_tickets(NUM_TICKETS)["text"].to_pylist()
    assert len(set(texts)) == NUM_TICKETS
    assert not [text for text in texts if "{" in text or "}" in text]


def test_every_situation_appears_and_no_route_is_rare() -> None:
    tickets = make_tickets(NUM_TICKETS)
    subjects = {subject for situations in SITUATIONS.values() for subject, *_ in situations}
    assert set(tickets["subject"].to_pylist()) == subjects
    counts = Counter(tickets["route"].to_pylist())
    assert set(counts) == {"billing", "bug", "other"}
    assert min(counts.values()) > NUM_TICKETS / 6
