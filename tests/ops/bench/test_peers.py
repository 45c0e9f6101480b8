"""A peer in a Python of its own: what it answers comes back, and an absent one says why."""

import sys
from pathlib import Path

import pytest

from ops.bench import peers
from ops.bench.peers import PeerAbsentError, peer_process
from ops.bench.systems import Answer
from ops.bench.tickets import TicketWorkload
from schemas.constraints import load_constraint
from schemas.records import ConstraintKind

WORKLOAD = TicketWorkload("b", ((1, 2, 3), (4,)), load_constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object"}'), 3)
ECHO = """
import json, sys
print(json.dumps({"system": " ".join(sys.argv[1:])}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["schema"] == "{}":
        raise MemoryError("no room")
    print(json.dumps([[prompt, asked["schema"]] for prompt in asked["prompts"]]), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    monkeypatch.setattr(peers, "SCRIPT", script)


@pytest.mark.usefixtures("echo")
def test_a_peer_is_told_model_and_threads_and_answers_row_by_row() -> None:
    with peer_process(Path(sys.executable), Path("model"), 2) as peer:
        assert peer.name == "model 2"
        schema = WORKLOAD.constraint.source
        assert peer.run(WORKLOAD) == [Answer(schema, 3, "length"), Answer(schema, 1, "stop")]


@pytest.mark.usefixtures("echo")
def test_a_peer_that_dies_is_absent_by_its_last_words() -> None:
    workload = TicketWorkload("b", ((1,),), load_constraint(ConstraintKind.JSON_SCHEMA, "{}"))
    with (
        pytest.raises(PeerAbsentError, match="MemoryError: no room"),
        peer_process(Path(sys.executable), Path("model"), 2) as peer,
    ):
        peer.run(workload)


def test_a_python_without_the_peer_s_package_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(PeerAbsentError, match="No module named 'openvino'"),
        peer_process(Path(sys.executable), tmp_path, 1),
    ):
        pass


def test_a_python_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(PeerAbsentError, match="No such file"), peer_process(tmp_path / "python", tmp_path, 1):
        pass
