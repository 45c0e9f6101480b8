"""States of a grammar that rows share: what one row finds out about a state, the next ones need not ask.

A state is known by the tokens that lead to it. Rows of one job pass through the same first ones; in free text they
part: from there on a row has a native matcher of its own, and shares only masks, with the rows at its place in the
language. Knows no grammar engine; of a mask, where it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from engine.types import Ids, Matcher

MAX_STATES = 2**14
"""Of one grammar."""
MIN_VISITS = 2
"""A state's continuations are kept once a second row is there, or where only one is possible."""


class Places(Protocol):
    """Places in the language of a grammar: two texts that lead to one place go on alike."""

    def first(self) -> Hashable:
        """The place before any text; None if places are not followed."""

    def after(self, place: Any, token_id: int) -> Hashable:
        """The place after one more token; None if it is not known."""


class Spot:
    """Where rows share a mask; ``mask`` is its row in the table of masks, 0 while it has none."""

    __slots__ = ("mask", "num_visits")

    def __init__(self) -> None:
        self.num_visits = 0
        self.mask = 0


class State(Spot):
    """A state with what is known about it."""

    __slots__ = (
        "children",
        "forced",
        "is_at_end",
        "is_terminated",
        "longer",
        "memo",
        "parent",
        "token",
    )

    def __init__(self, parent: State | None, token: int, is_terminated: bool) -> None:
        super().__init__()
        self.parent = parent
        self.token = token
        self.is_terminated = is_terminated
        self.children: dict[int, State] = {}
        self.memo: dict[Ids, Ids] = {}
        self.forced: str | None = None
        self.is_at_end: bool | None = None
        self.longer: dict[int, bool] = {}

    @property
    def path(self) -> list[int]:
        """The tokens that lead here."""
        tokens, state = [], self
        while state.parent is not None:
            tokens.append(state.token)
            state = state.parent
        return tokens[::-1]


class SharedStates:
    """The states of one grammar; ``start`` makes a native matcher, ``places`` follow its language if they can."""

    def __init__(self, start: Callable[[], Matcher], places: Places | None = None) -> None:
        self.start = start
        self.places = places
        self.root = State(None, -1, is_terminated=False)
        self.num_states = 1
        self._spots: dict[Hashable, Spot] = {}

    def add(self, parent: State, token: int, is_terminated: bool) -> State:
        """Keep the state after ``token``."""
        self.num_states += 1
        child = parent.children[token] = State(parent, token, is_terminated)
        return child

    def place_of(self, tokens: list[int]) -> Hashable:
        """The place after these tokens; None if it is not known."""
        place = self.places.first() if self.places else None
        for token in tokens:
            place = self.after(place, token)
        return place

    def after(self, place: Hashable, token: int) -> Hashable:
        """The place after one more token; None if either is not known."""
        return self.places.after(place, token) if self.places and place is not None else None

    def spot(self, place: Hashable) -> Spot | None:
        """What rows at a place share, one more of them being there; None where nothing more is kept."""
        spot = self._spots.get(place)
        if spot is None:
            if place is None or len(self._spots) >= MAX_STATES:
                return None
            spot = self._spots[place] = Spot()
        spot.num_visits += 1
        return spot


class SharedMatcher:
    """Implements Matcher, for one row: in a shared state, or from some token on with a native matcher alone."""

    def __init__(self, states: SharedStates) -> None:
        self._states = states
        self._native: Matcher | None = None
        self._native_at: State | None = None  # where the native matcher stands, while there is a state
        self._passed: list[Hashable] = []  # places since the row has no state
        self.state: State | None = states.root
        states.root.num_visits += 1

    def spot(self) -> Spot | None:
        """Where this row may share a mask."""
        return self.state or self._states.spot(self._last_place)

    @property
    def _last_place(self) -> Hashable:
        return self._passed[-1] if self._passed else None

    @property
    def native(self) -> Matcher:
        """A native matcher in this state, for this row alone."""
        if self._native is None or self._native_at is not self.state:
            assert self.state is not None, "a row without a state has a matcher"
            self._native, self._native_at = self._states.start(), self.state
            for token in self.state.path:
                self._native.accept(token)
        return self._native

    @property
    def memo(self) -> dict[Ids, Ids] | None:
        """See Matcher.memo."""
        return self.state.memo if self.state else None

    @property
    def is_terminated(self) -> bool:
        """See Matcher.is_terminated."""
        return self.state.is_terminated if self.state else self.native.is_terminated

    def accept(self, token_id: int) -> bool:
        """See Matcher.accept."""
        state = self.state
        if state is not None and (child := state.children.get(token_id)) is not None:
            child.num_visits += 1
            self.state = child
            return True
        native = self.native
        is_kept = state is not None and self._keeps(state)
        if not native.accept(token_id):
            return False
        if state is None:
            self._pass(self._last_place, token_id)
            return True
        self.state = self._states.add(state, token_id, native.is_terminated) if is_kept else None
        self._native_at = self.state
        if self.state:
            self.state.num_visits += 1
        else:
            self._pass(self._states.place_of(state.path), token_id)
        return True

    def _pass(self, place: Hashable, token_id: int) -> None:
        self._passed.append(None if self.native.is_terminated else self._states.after(place, token_id))

    def rollback(self, num_tokens: int) -> None:
        """See Matcher.rollback."""
        if self.state is None:
            self.native.rollback(num_tokens)
            del self._passed[-num_tokens:]
            return
        for _ in range(num_tokens):
            assert self.state.parent is not None, "no more can be taken back than was accepted"
            self.state.num_visits -= 1
            self.state = self.state.parent

    def can_end(self) -> bool:
        """See Matcher.can_end."""
        return self.native.can_end()

    def is_at_end(self) -> bool:
        """See Matcher.is_at_end."""
        if self.state is None:
            return self.native.is_at_end()
        if self.state.is_at_end is None:
            self.state.is_at_end = self.native.is_at_end()
        return self.state.is_at_end

    def forced_text(self) -> str:
        """See Matcher.forced_text."""
        if self.state is None:
            return self.native.forced_text()
        if self.state.forced is None:
            self.state.forced = self.native.forced_text()
        return self.state.forced

    def allows_longer(self, token_id: int) -> bool:
        """See Matcher.allows_longer."""
        if self.state is None:
            return self.native.allows_longer(token_id)
        if token_id not in self.state.longer:
            self.state.longer[token_id] = self.native.allows_longer(token_id)
        return self.state.longer[token_id]

    def _keeps(self, state: State) -> bool:
        """Whether what follows ``state``, where this row stands, becomes a shared state."""
        if self._states.num_states >= MAX_STATES:
            return False
        return state.num_visits >= MIN_VISITS or bool(self.forced_text())
