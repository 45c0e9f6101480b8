"""Frames survive any way a socket cuts them, and what is no frame is refused by name."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import pipe
from engine.frames import Cancel, Stop, Submit, decode_client_frame
from engine.pipe import LENGTH, FrameBuffer, pack
from schemas.errors import EngineError
from schemas.records import Request

FRAMES = (Submit(requests=(Request(request_id="1", text="é" * 300),)), Stop(), Cancel(request_ids=("1", "2")), Stop())


@given(cuts=st.lists(st.integers(min_value=0, max_value=700)))
def test_frames_arrive_whole_however_the_stream_is_cut(cuts: list[int]) -> None:
    stream = b"".join(pack(frame) for frame in FRAMES)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    buffer = FrameBuffer()
    bodies = [body for start, end in itertools.pairwise(edges) for body in buffer.feed(stream[start:end])]
    assert tuple(decode_client_frame(body) for body in bodies) == FRAMES


def test_a_frame_of_impossible_length_is_refused_before_it_is_read() -> None:
    with pytest.raises(EngineError, match="frame of 4294967295 bytes announced"):
        list(FrameBuffer().feed(LENGTH.pack(2**32 - 1)))


def test_a_frame_too_large_to_send_names_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "MAX_FRAME_BYTES", 100)
    with pytest.raises(EngineError, match=r"Submit frame is \d+ bytes, limit 100"):
        pack(FRAMES[0])
