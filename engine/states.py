"""States of a grammar that rows share: what one row finds out about a state, the next ones need not ask.

A state is a place in the grammar's language, where places are followed: texts that lead to it go on alike. Elsewhere it
is the tokens that lead to it, and once rows part it is one row's alone. A row asks a native matcher of its own only for
what no row has found out. Knows no grammar engine; of a mask, where it is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from engine.spelling import Spellings, Way
from engine.types import Ids, Matcher
from engine.vocabulary import NO_SHAPES

MAX_STATES = 2**14
"""Of one grammar; beyond, all are forgotten."""
MAX_EDGES = 2**16
"""Tokens of one grammar that are kept with the state they lead to: a look-up instead of a walk."""
MIN_VISITS = 2
"""Where places are not followed, a state is kept if it is the only one to follow, or for a second row."""

NO_ROW, ALLOWS_ALL, ALLOWS_NONE = -1, 0, 1
"""Rows of the table of masks."""


class Places(Protocol):
    """Places in the language of a grammar: two texts that lead to one place go on alike."""

    def first(self) -> Hashable:
        """The place before any text; None if places are not followed."""

    def after(self, place: Any, token_id: int) -> Hashable:
        """The place after one more token; None if it is not known."""

    def shapes(self, place: Any) -> Mapping[int, int]:
        """Names of tokens that are alike, by token; a token that is like no other has its own."""

    def is_alike(self, place: Any, token_id: int) -> bool:
        """Whether tokens that are named like this one lead from here to the same place, and to no spellings there."""

    def spellings(self, place: Any, context: Ids) -> Spellings | None:
        """How the ways to go on are written behind the tokens ``context``, if they are few."""


class State:
    """A state with what is known about it."""

    __slots__ = (
        "allowed",
        "can_end",
        "children",
        "forced",
        "is_at_end",
        "is_kept",
        "is_spelled",
        "is_terminated",
        "longer",
        "memo",
        "num_visits",
        "place",
        "row",
        "shapes",
        "way",
    )

    def __init__(self, place: Any = None, way: Way | None = None, *, is_kept: bool = False) -> None:
        self.place = place
        self.way = way
        self.is_spelled = way is not None  # the mask leaves that way alone
        self.is_kept = is_kept  # else one row alone is here
        self.children: dict[int, State] = {}  # by the token, or by its shape where others of that shape lead there too
        self.shapes: Mapping[int, int] = NO_SHAPES
        self.num_visits = 0  # of rows that found no child
        self.row = NO_ROW  # of its mask in the table, ...
        self.allowed: bytes | None = None  # ... and the bits of the grammar's
        self.is_terminated = False
        self.can_end: bool | None = None
        self.is_at_end: bool | None = None
        self.forced: str | None = None
        self.longer: dict[int, bool] = {}
        self.memo: dict[Ids, Ids] = {}

    @classmethod
    def last(cls, *, is_terminated: bool) -> State:
        """A state that nothing follows."""
        state = cls(is_kept=is_terminated)
        state.row, state.allowed, state.forced = ALLOWS_NONE, b"", ""
        state.is_terminated = state.can_end = state.is_at_end = is_terminated
        return state

    def allows(self, token_id: int) -> bool:
        """What the grammar says; only where there is a mask."""
        assert self.allowed is not None, "a mask is asked once it is filled"
        place = token_id >> 3
        return place < len(self.allowed) and bool(self.allowed[place] >> (token_id & 7) & 1)


class SharedStates:
    """The states of one grammar; ``start`` makes a native matcher, ``places`` follow its language if they can."""

    def __init__(
        self, start: Callable[[], Matcher], end_token_ids: frozenset[int], places: Places | None = None
    ) -> None:
        self.start = start
        self._places = places
        place = places.first() if places else None
        self.root = self._state_at(place, self._spell(place, ()))
        self.num_states = 1
        self._end_token_ids = end_token_ids
        self._terminated = State.last(is_terminated=True)
        self._by_place: dict[tuple[Hashable, Way | None], State] = {(self.root.place, self.root.way): self.root}
        self._num_edges = 0

    def after(self, state: State, token_id: int, *, is_kept: bool) -> State:
        """The state after a token that is allowed; ``is_kept``: rows shall find it, even if its place is not known."""
        if token_id in self._end_token_ids:
            child = self._terminated
        elif (place := self._place_after(state, token_id)) is None:
            child = self._add(None, None) if is_kept else State()
        else:
            way = (state.way and state.way.step(token_id)) or self._spell(place, (token_id,))
            child = self._by_place.get((place, way)) or self._add(place, way)
        if state.is_kept and child.is_kept and self._num_edges < MAX_EDGES:
            state.children[self._name(state, token_id)] = child
            self._num_edges += 1
        return child

    def _name(self, state: State, token_id: int) -> int:
        """What ``children`` have a token under."""
        shape = state.shapes[token_id]
        is_shared = shape != token_id and self._places and self._places.is_alike(state.place, token_id)
        return shape if is_shared else token_id

    def _forget(self) -> None:
        """Start anew: what is needed comes back. Rows keep the states that they are in."""
        self.num_states, self._num_edges = 1, 0
        self.root.children.clear()
        self._by_place = {(self.root.place, self.root.way): self.root}

    def _place_after(self, state: State, token_id: int) -> Hashable:
        return None if self._places is None or state.place is None else self._places.after(state.place, token_id)

    def _spell(self, place: Hashable, context: Ids) -> Way | None:
        """The way that begins here, if one does; it depends on the last token, as the tokenizer does."""
        if self._places is None or place is None:
            return None
        spellings = self._places.spellings(place, context)
        return Way(spellings) if spellings else None

    def _add(self, place: Hashable, way: Way | None) -> State:
        if self.num_states >= MAX_STATES:
            self._forget()
        self.num_states += 1
        state = self._state_at(place, way)
        if place is not None:
            self._by_place[place, way] = state
        return state

    def _state_at(self, place: Hashable, way: Way | None) -> State:
        state = State(place, way, is_kept=True)
        if self._places and place is not None and way is None:
            state.shapes = self._places.shapes(place)
        return state


class SharedMatcher:
    """Implements Matcher, for one row."""

    __slots__ = ("_is_trial", "_native", "_num_native", "_passed", "_states", "_tokens", "state")

    def __init__(self, states: SharedStates) -> None:
        self.state = states.root
        self._states = states
        self._passed: list[State] = []  # before each ...
        self._tokens: list[int] = []  # ... of these
        self._native: Matcher | None = None
        self._num_native = 0  # tokens that it has accepted
        self._is_trial = False

    def fork(self) -> SharedMatcher:
        """A matcher in this state for tokens that may not come: no visit of what rows share is counted."""
        fork = copy.copy(self)
        fork._is_trial = True
        fork._passed, fork._tokens = self._passed[:], self._tokens[:]
        is_followed = self.state.place is not None  # then a native matcher is rarely needed, and started when it is
        if is_followed or self._native is None:
            fork._native, fork._num_native = None, 0
        else:
            fork._native = self._native.fork()
        return fork

    @property
    def native(self) -> Matcher | None:
        """A native matcher in this state, for this row alone; None where it refuses to come: nothing follows then.

        It would be a fault of the places, and costs this row alone.
        """
        native = self._native = self._native or self._states.start()
        for token_id in self._tokens[self._num_native :]:
            if not native.accept(token_id):
                self.state = State.last(is_terminated=False)
                return None
            self._num_native += 1
        return native

    @property
    def memo(self) -> dict[Ids, Ids]:
        """See Matcher.memo."""
        return self.state.memo

    @property
    def way(self) -> Way | None:
        """See Matcher.way."""
        return self.state.way

    @property
    def is_terminated(self) -> bool:
        """See Matcher.is_terminated."""
        return self.state.is_terminated

    def accept(self, token_id: int) -> bool:
        """See Matcher.accept."""
        state = self.state
        child = state.children.get(state.shapes[token_id]) or self._find(token_id)
        if child is None:
            return False
        self._passed.append(state)
        self._tokens.append(token_id)
        self.state = child
        return True

    def rollback(self, num_tokens: int) -> None:
        """See Matcher.rollback."""
        if num_tokens == 0:
            return
        self.state = self._passed[-num_tokens]
        del self._passed[-num_tokens:], self._tokens[-num_tokens:]
        if self._native and (num_ahead := self._num_native - len(self._tokens)) > 0:
            self._native.rollback(num_ahead)
            self._num_native -= num_ahead

    def place_before(self, num_tokens: int) -> Any:
        """The place so many tokens ago; None if it is not known."""
        return (self._passed[-num_tokens] if num_tokens else self.state).place

    def passed(self) -> list[State]:
        """The state before each token."""
        return self._passed

    def can_end(self) -> bool:
        """See Matcher.can_end."""
        if self.state.can_end is None and (native := self.native):
            self.state.can_end = native.can_end()
        return bool(self.state.can_end)

    def is_at_end(self) -> bool:
        """See Matcher.is_at_end."""
        if self.state.is_at_end is None and (native := self.native):
            self.state.is_at_end = native.is_at_end()
        return bool(self.state.is_at_end)

    def forced_text(self) -> str:
        """See Matcher.forced_text."""
        if self.state.forced is None and (native := self.native):
            self.state.forced = native.forced_text()
        return self.state.forced or ""

    def allows_longer(self, token_id: int) -> bool:
        """See Matcher.allows_longer."""
        if token_id not in self.state.longer and (native := self.native):
            self.state.longer[token_id] = native.allows_longer(token_id)
        return self.state.longer.get(token_id, False)

    def _find(self, token_id: int) -> State | None:
        """The state after a token whose shape says nothing; None if the grammar does not allow it."""
        state = self.state
        if child := state.children.get(token_id):
            return child
        if state.allowed is not None:
            return self._states.after(state, token_id, is_kept=self._keeps(state)) if state.allows(token_id) else None
        is_kept, native = self._keeps(state), self.native
        if native is None or not native.accept(token_id):
            return None
        self._num_native += 1
        return self._states.after(state, token_id, is_kept=is_kept)

    def _keeps(self, state: State) -> bool:
        """Whether what follows ``state``, where this row stands, is kept even if its place is not known."""
        if state.place is not None or not state.is_kept or self._is_trial:
            return False
        state.num_visits += 1
        return state.num_visits >= MIN_VISITS or bool(self.forced_text())
