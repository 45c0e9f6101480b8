"""How sure the model was of each label of a finished output, and of the others of its set, at temperature 1.

Unranked: the product over the tokens at which spellings part, each among those that the mask allows; see
engine.spelling. Where the mask allows other spellings too, it is a lower bound. Ranked: the spellings that the
tokenizer gives all labels in their place, as a trie in which each branch shares out what it has.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.device import ToHost, to_device
from engine.forced import CONTEXT_TOKENS
from engine.spelling import Way
from engine.states import State
from engine.text import Text
from engine.types import Sequence
from schemas.choices import Choice, find_choices
from schemas.records import Completion, Constraint, Label

Ids = tuple[int, ...]
Ways = tuple[tuple[int, int], ...]
"""Branches and, at each, which of its tokens is taken."""

FOLLOWING = frozenset('}], "')
"""What stands after a label in its document up to the next value: it belongs to the label's last token."""
MAX_FOLLOWING = 8
OUTPUTS_KEPT, TRIES_KEPT = 4096, 256


class Branch(NamedTuple):
    """A point where the spellings of labels part: the tokens up to it, and those that may come next."""

    prefix: Ids
    tokens: Ids


@dataclass(frozen=True)
class Trie:
    """The spellings of a set of labels, up to where each is the only one left: its label, and the ways it takes."""

    num_labels: int
    branches: tuple[Branch, ...]
    leaves: tuple[tuple[int, Ways], ...]

    def probabilities(self, logprobs: Seq[Seq[float]]) -> list[float]:
        """Of each label, its leaves summed, from the log-probabilities of each branch's tokens."""
        totals = [0.0] * self.num_labels
        for label, ways in self.leaves:
            totals[label] += math.exp(sum(logprobs[branch][way] for branch, way in ways))
        return totals


def build_trie(num_labels: int, spellings: Seq[tuple[int, Ids]]) -> Trie | None:
    """Find where spellings, given with the index of their label, part; None if two labels are spelled alike."""
    branches: list[Branch] = []
    leaves: list[tuple[int, Ways]] = []
    queue: list[tuple[Seq[tuple[int, Ids]], int, Ways]] = [(spellings, 0, ())]
    while queue:
        members, depth, ways = queue.pop()
        label, spelled = members[0]
        if all(other == label for other, _ in members):
            leaves.append((label, ways))
            continue
        following: dict[int, list[tuple[int, Ids]]] = {}
        for member in members:
            if depth == len(member[1]):
                return None
            following.setdefault(member[1][depth], []).append(member)
        if len(following) == 1:
            queue.append((members, depth + 1, ways))
            continue
        taken = [(*ways, (len(branches), way)) for way in range(len(following))]
        queue += [(group, depth + 1, way) for group, way in zip(following.values(), taken, strict=True)]
        branches.append(Branch(spelled[:depth], tuple(following)))
    return Trie(num_labels, tuple(branches), tuple(leaves))


class Located(NamedTuple):
    """A choice among the output tokens: those that spell it, and what stands before it."""

    choice: Choice
    start: int  # of its tokens
    end: int
    num_before: int  # tokens before its spelling, which begins with ``lead`` where a token begins in front of it
    lead: str


def locate_choices(constraint: Constraint, text: str, pieces: tuple[bytes, ...]) -> tuple[Located, ...]:
    """The choices of a text that is spelled by the tokens ``pieces``; none if it is another text."""
    spelled = b"".join(pieces)
    if spelled != text.encode():
        return ()
    ends = list(itertools.accumulate(map(len, pieces)))
    starts = [0, *ends[:-1]]
    located = []
    for choice in find_choices(constraint, text):
        start, end = (len(text[:at].encode()) for at in (choice.start, choice.end))
        first = num_before = bisect_right(ends, start)
        while spelled[starts[num_before]] & 0xC0 == 0x80:  # a token may begin within a character
            num_before -= 1
        written = choice.labels[choice.index]
        is_open = any(label != written and label.startswith(written) for label in choice.labels)
        last = bisect_left(starts, end + is_open)  # what follows tells it from a longer label
        located.append(Located(choice, first, last, num_before, spelled[starts[num_before] : start].decode()))
    return tuple(located)


@dataclass(eq=False)
class _Row:
    """A completion whose labels are being ranked. Owned by its Labels."""

    completion: Completion
    num_ranked: int
    num_missing: int = 0


@dataclass(eq=False)
class _Ranking:
    """One label of a row, being compared with the others of its set."""

    row: _Row
    label_index: int
    choice: Choice
    trie: Trie
    logprobs: dict[int, Seq[float]] = field(default_factory=dict)  # by branch

    def finish(self) -> None:
        """Put the distribution into the row's completion."""
        probabilities = self.trie.probabilities([self.logprobs[index] for index in range(len(self.trie.branches))])
        ranked = sorted(zip(self.choice.names, probabilities, strict=True), key=lambda pair: -pair[1])
        labels = list(self.row.completion.labels)
        labels[self.label_index] = msgspec.structs.replace(
            labels[self.label_index],
            probability=probabilities[self.choice.index],
            margin=ranked[0][1] - ranked[1][1],
            entropy=-sum(p * math.log(p) for p in probabilities if p > 0),
            ranked=tuple(ranked[: self.row.num_ranked]),
        )
        self.row.completion = msgspec.structs.replace(self.row.completion, labels=tuple(labels))


class Labels:
    """The labels of one engine's outputs. All methods belong to the loop's thread.

    A ranking takes one short run for each branch of its trie, behind the row's cached prefix: sequences like any other,
    so that those of many rows share a step.
    """

    def __init__(self, text: Text, max_model_len: int) -> None:
        self._text = text
        self._max_model_len = max_model_len
        self._locate = lru_cache(OUTPUTS_KEPT)(locate_choices)
        self._trie = lru_cache(TRIES_KEPT)(self._make_trie)
        self._asked: dict[Sequence, tuple[_Ranking, int]] = {}

    def add_to(
        self, completion: Completion, sequence: Sequence, constraint: Constraint, tokens: Seq[bytes]
    ) -> tuple[Completion, list[Sequence]]:
        """The completion of ``sequence`` with its labels, and what must run before they are ranked.

        ``tokens`` are the vocabulary as bytes. With something to run, ``take`` returns the final completion.
        """
        pieces = tuple(tokens[token_id] for token_id in completion.token_ids[sequence.num_thought :])
        logprobs = sequence.logprobs[sequence.num_thought :]
        passed = sequence.matcher.passed() if sequence.matcher else []
        num_own = len(pieces) - sequence.num_steered  # labels behind them are not the model's
        located = [each for each in self._locate(constraint, completion.text, pieces) if each.end <= num_own]
        located = [_with_lead(each, passed, pieces) for each in located]
        labels = tuple(
            Label(
                path=choice.path,
                text=choice.names[choice.index],
                probability=math.exp(_logprob(logprobs[start:end], passed[start:end])),
            )
            for choice, start, end, _, _ in located
        )
        row = _Row(msgspec.structs.replace(completion, labels=labels), sequence.request.sampling.top_labels)
        asked = [probe for i, each in enumerate(located) for probe in self._ask(row, i, each, sequence)]
        row.num_missing = len(asked)
        return row.completion, asked

    def take(self, probe: Sequence, logprobs: Seq[float]) -> Completion | None:
        """Take in what a branch's tokens got; returns the completion if it was its last branch."""
        ranking, branch = self._asked.pop(probe)
        ranking.logprobs[branch] = logprobs
        if len(ranking.logprobs) == len(ranking.trie.branches):
            ranking.finish()
        ranking.row.num_missing -= 1
        return None if ranking.row.num_missing else ranking.row.completion

    def _ask(self, row: _Row, label_index: int, located: Located, sequence: Sequence) -> list[Sequence]:
        """The runs that rank one label; none where ranking is off or impossible: then the label stays unranked."""
        if row.num_ranked == 0:
            return []
        choice, text = located.choice, row.completion.text
        before = sequence.token_ids[: sequence.answer_start + located.num_before]
        following = "".join(itertools.takewhile(FOLLOWING.__contains__, text[choice.end :]))[:MAX_FOLLOWING]
        is_last = choice.end == len(text)
        trie = self._trie(tuple(before[-CONTEXT_TOKENS:]), located.lead, choice.labels, following, is_last)
        longest = max(len(branch.prefix) for branch in trie.branches) if trie else 0
        if trie is None or len(before) + longest >= self._max_model_len:
            return []
        ranking = _Ranking(row, label_index, choice, trie)
        probes = []
        for index, branch in enumerate(trie.branches):
            token_ids = before + array("q", branch.prefix)
            probe = Sequence(sequence.request, token_ids, len(token_ids), max_tokens=1, branch=branch.tokens)
            self._asked[probe] = (ranking, index)
            probes.append(probe)
        return probes

    def _make_trie(self, context: Ids, lead: str, labels: Seq[str], following: str, is_last: bool) -> Trie | None:
        """Spell labels after ``context``; where nothing follows, an end token does, and each of them counts."""
        ends: list[Ids] = [(end_id,) for end_id in sorted(self._text.eos_token_ids)] if is_last else [()]
        spellings = [self._text.encode_after(context, lead + label + following) for label in labels]
        return build_trie(len(labels), [(index, ids + end) for index, ids in enumerate(spellings) for end in ends])


def _with_lead(located: Located, passed: Seq[State], pieces: Seq[bytes]) -> Located:
    """Let a choice begin where its spellings do: they may part at a blank before it, which belongs to some tokens."""
    first = located.start
    way = passed[first].way if first < len(passed) else None
    while way and first and _is_on(way, passed[first - 1]):
        first -= 1
    num_before = min(first, located.num_before)
    lead = b"".join(pieces[num_before : located.num_before]).decode() + located.lead
    return located._replace(start=first, num_before=num_before, lead=lead)


def _logprob(logprobs: Seq[float], passed: Seq[State]) -> float:
    """Of a label's tokens, drawn in the states ``passed``: up to where its spelling is the only one left.

    Of all of them where other spellings were allowed.
    """
    way = passed[0].way if passed else None
    if way is None:
        return sum(logprobs)
    own = [(logprob, state) for logprob, state in zip(logprobs, passed, strict=False) if _is_on(way, state)]
    return sum(logprob for logprob, _ in own) if all(state.is_spelled for _, state in own) else sum(logprobs)


def _is_on(way: Way, state: State) -> bool:
    return state.way is not None and state.way.spellings is way.spellings


def launch_branches(logits: Tensor, sequences: Seq[Sequence]) -> tuple[list[Sequence], ToHost] | None:
    """Launch the log-probabilities, float32 [P, B], of the tokens that the sequences' branches ask for.

    ``logits`` float32 [L, V], a row for each sequence, are read only. None if no sequence has a branch.
    """
    rows = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.branch]
    if not rows:
        return None
    width = max(len(sequence.branch) for _, sequence in rows)
    tokens = np.full((len(rows), width), -1, dtype=np.int64)
    for place, (_, sequence) in zip(tokens, rows, strict=True):
        place[: len(sequence.branch)] = sequence.branch
    arrays = {"rows": np.array([row for row, _ in rows], dtype=np.int64), "tokens": tokens}
    on_device = to_device(arrays, logits.device)
    picked = logits[on_device["rows"][:, None], on_device["tokens"].clamp(min=0)]
    picked = picked.masked_fill(on_device["tokens"] < 0, -torch.inf)
    return [sequence for _, sequence in rows], ToHost(picked.log_softmax(dim=-1))
