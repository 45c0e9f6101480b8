"""Match whole texts against a regex tree in linear time, whatever the pattern: ``(a+)+b`` must not hang a worker.

A nondeterministic automaton whose sets of states are made deterministic as texts need them. Knows no regex syntax.
"""

from schemas.regex import MAX_CODEPOINT, Chars, Node, Ranges, RegexError, Repeat, Seq

MAX_STATES = 50_000
MAX_CACHED_STEPS = 100_000
MAX_VISITED = 100_000
"""States visited before two patterns count as too complex: some tenths of a second."""


def _representatives(ranges: list[tuple[int, int]]) -> list[str]:
    """One character for each set of characters that the ranges tell apart."""
    edges = {0, *(low for low, _ in ranges), *(high + 1 for _, high in ranges)}
    return [chr(edge) for edge in edges if edge <= MAX_CODEPOINT]


class Automaton:
    """The automaton of one tree without anchors."""

    def __init__(self, tree: Node) -> None:
        """Raises RegexError where repetitions unfold to more than MAX_STATES states."""
        self._empty: list[list[int]] = []
        self._edges: list[list[tuple[Ranges, int]]] = []
        start = self._new_state()
        self._end = self._build(tree, start)
        self._start = self._closure({start})
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def first_error(self, text: str) -> int | None:
        """None if the whole text matches, else the index of the first misfit (its length: it ends too early)."""
        states = self._start
        for position, char in enumerate(text):
            following = self._steps.get((states, char))
            states = self._step(states, char) if following is None else following
            if not states:
                return position
        return None if self._end in states else len(text)

    def overlaps(self, other: "Automaton") -> bool:
        """Whether some text matches both. Raises RegexError where that takes too long to find out."""
        start = (self._start, other._start)
        queue, seen, num_visited = [start], {start}, 0
        while queue:
            mine, theirs = queue.pop()
            if self._end in mine and other._end in theirs:
                return True
            representatives = _representatives([*self._ranges(mine), *other._ranges(theirs)])
            num_visited += len(representatives) * (len(mine) + len(theirs))
            for char in representatives:
                pair = (self._step(mine, char), other._step(theirs, char))
                if all(pair) and pair not in seen:
                    seen.add(pair)
                    queue.append(pair)
            if num_visited > MAX_VISITED:
                raise RegexError("two patterns are too complex to be told apart")
        return False

    def _ranges(self, states: frozenset[int]) -> list[tuple[int, int]]:
        return [pair for state in states for ranges, _ in self._edges[state] for pair in ranges]

    def _step(self, states: frozenset[int], char: str) -> frozenset[int]:
        code = ord(char)
        reached = {
            target
            for state in states
            for ranges, target in self._edges[state]
            if any(low <= code <= high for low, high in ranges)
        }
        if len(self._steps) >= MAX_CACHED_STEPS:
            self._steps.clear()
        self._steps[states, char] = following = self._closure(reached)
        return following

    def _closure(self, states: set[int]) -> frozenset[int]:
        queue = list(states)
        while queue:
            more = set(self._empty[queue.pop()]) - states
            states |= more
            queue += more
        return frozenset(states)

    def _new_state(self) -> int:
        if len(self._edges) >= MAX_STATES:
            raise RegexError(f"its repetitions unfold to more than {MAX_STATES} characters: lower them")
        self._empty.append([])
        self._edges.append([])
        return len(self._edges) - 1

    def _build(self, tree: Node, start: int) -> int:
        """Add the states of ``tree`` after ``start``; return the state reached by matching it."""
        if isinstance(tree, Chars):
            end = self._new_state()
            self._edges[start].append((tree.ranges, end))
            return end
        if isinstance(tree, Seq):
            for item in tree.items:
                start = self._build(item, start)
            return start
        if isinstance(tree, Repeat):
            return self._build_repeat(tree, start)
        end = self._new_state()
        for option in getattr(tree, "options", ()):
            self._empty[self._build(option, self._branch(start))].append(end)
        return end

    def _build_repeat(self, tree: Repeat, start: int) -> int:
        for _ in range(tree.low):
            start = self._build(tree.item, start)
        if tree.high is None:
            loop = self._branch(start)
            self._empty[self._build(tree.item, loop)].append(loop)
            return self._branch(loop)
        end = self._new_state()
        for _ in range(tree.high - tree.low):
            self._empty[start].append(end)
            start = self._build(tree.item, start)
        self._empty[start].append(end)
        return end

    def _branch(self, start: int) -> int:
        state = self._new_state()
        self._empty[start].append(state)
        return state
