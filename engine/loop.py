"""The engine: requests in, completions out, one step at a time: admit -> launch -> collect.

Runs in one thread and knows no pipes and no processes. A bad request ends as a completion that says why; an exception
in a step is a bug or a broken device, and is the caller's to report.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.cache import BlockPool
from engine.device import ToHost, gpu_uuids, resolve_sizes
from engine.draft import Drafter, resolve_num_drafts
from engine.forced import CONTEXT_TOKENS, ForcedText
from engine.grammar import Grammars
from engine.labels import Labels, launch_branches
from engine.lookahead import Ahead
from engine.overlong import TooLong
from engine.parts import Parts, load_parts
from engine.prompt import Prompt, read_prompt
from engine.replica import make_replica
from engine.sampler import Draw, Sampler
from engine.scheduler import Scheduler
from engine.stats import EngineStats
from engine.text import find_stop
from engine.thinking import Thoughts
from engine.types import Ids, Run, Sequence, SequenceStatus, StepPlan
from schemas.errors import ConstraintError, EngineError, PromptError
from schemas.records import Completion, Constraint, FinishReason, ModelRef, Request
from schemas.settings import EngineSettings

COMPILE_WAIT_S = 0.02
"""How long a step with nothing else to do waits for a grammar: short, because the caller reads its pipe in between."""


@dataclass(frozen=True)
class Launched:
    """A step on its way: the runs that get tokens, and the draw that has them. Some only ask about labels."""

    runs: list[Run]
    draw: Draw | None
    num_rows: int
    branches: tuple[list[Sequence], ToHost] | None = None
    ahead: Ahead | None = None


class Engine:
    """One model on one device, serving any number of requests."""

    def __init__(self, model: ModelRef, settings: EngineSettings, parts: Parts | None = None) -> None:
        parts = parts or load_parts(model, settings)
        spec = parts.model.spec
        sizes = resolve_sizes(settings, parts.device, block_size=parts.model.block_size)
        self.max_model_len = min(model.max_model_len, spec.max_position_embeddings)
        self.credits = max(256, 2 * sizes.max_num_seqs)  # the second half keeps the batch full across the pipe's delay
        self.device = str(parts.device)
        self.gpus = gpu_uuids(parts.device)
        self.choices = parts.choices
        self.stats = EngineStats()
        self._vocab_size = spec.vocab_size
        self._text = parts.text
        self._replica = make_replica(
            parts.model, parts.device, parts.ranks, settings, sizes=sizes, max_model_len=self.max_model_len
        )
        self._sampler = Sampler(parts.kernels, parts.device)
        self._forced = ForcedText(parts.text)
        self._drafter = Drafter(
            parts.draft_source,
            self._forced,
            parts.text.eos_token_ids,
            resolve_num_drafts(settings, parts.device),
            self.stats,
        )
        self._labels = Labels(parts.text, self.max_model_len)
        self._scheduler = Scheduler(
            BlockPool(self._replica.num_blocks, sizes.block_size, prefix_cache=settings.prefix_cache),
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            step_sizes=self._replica.step_sizes,
        )
        self._grammars = Grammars(
            parts.text.tokenizer,
            vocab_size=spec.vocab_size,
            end_token_ids=parts.text.eos_token_ids,
            timeout_s=settings.compile_timeout_s,
            num_threads=torch.get_num_threads(),
            device=parts.device,
            directory=settings.grammar_dir,
            encode=parts.text.encode_after,
        )
        self._thoughts = Thoughts(parts.text, lambda: self._grammars.pieces)
        self._sequences: dict[str, Sequence] = {}  # every request that has no completion yet, by id
        self._awaiting_grammar: defaultdict[str, list[Sequence]] = defaultdict(list)
        self._completions: list[Completion] = []
        may_overlap = parts.device.type == "cuda" if settings.overlap is None else settings.overlap
        self._overlaps = may_overlap and self._replica.lookahead is None  # which starts from tokens that were read
        self._in_flight: Launched | None = None  # the last step, when its draw is not read yet

    def step(self) -> list[Completion]:
        """Advance all running sequences by one step and return what ended since the last call."""
        started_s = time.perf_counter()
        self._admit()
        launched, collected = self._launch(), self._in_flight
        if self._in_flight:
            self._collect(self._in_flight)  # while the device computes what was just launched
        self._in_flight = launched
        if launched and not self._overlaps:
            self._collect(launched)
            collected, self._in_flight = launched, None
        step_s = time.perf_counter() - started_s
        self.stats.step_s += step_s
        if collected:
            self._drafter.costs.note(collected.num_rows, step_s)
        completions, self._completions = self._completions, []
        return completions

    def add_constraint(self, constraint: Constraint) -> None:
        """Make a constraint known before the first request that names it."""
        self._grammars.add(constraint)
        if self._grammars.is_crowded:
            unfinished = {sequence.request.constraint_key for sequence in self._sequences.values()}
            self._grammars.forget(unfinished | {constraint.key})

    def tokenize(self, request: Request) -> Prompt:
        """Tokenise and check a prompt, or return what is wrong with it. May run in another thread than all the rest."""
        return read_prompt(request, self._text, max_tokens=self.max_model_len - 1, vocab_size=self._vocab_size)

    def add(self, request: Request, prompt: Prompt | None = None) -> None:
        """Queue a request. A bad one ends with a completion; only an id in flight already raises EngineError.

        ``prompt`` is what ``tokenize`` made of it, if that was done before.
        """
        if request.request_id in self._sequences:
            raise EngineError(f"request {request.request_id!r} is in flight already")
        token_ids = self.tokenize(request) if prompt is None else prompt
        if isinstance(token_ids, PromptError):
            self._reject(request, FinishReason.ERROR, str(token_ids))
            return
        if isinstance(token_ids, TooLong):
            limit = f"{token_ids}, limit {self.max_model_len - 1} (max_model_len less one for the output)"
            self._reject(request, FinishReason.PROMPT_TOO_LONG, limit, token_ids.num_tokens)
            return
        num_prompt = len(token_ids)
        max_tokens = min(request.sampling.budget, self.max_model_len - num_prompt)
        sequence = Sequence(request, token_ids, num_prompt, max_tokens)
        if request.sampling.stop:
            sequence.detokenizer = self._text.detokenizer()
        self._sequences[request.request_id] = sequence
        self._queue(sequence)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End these requests with what they have; ids that are not in flight are ignored."""
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.status is not SequenceStatus.FINISHED:
                self._finish(sequence, FinishReason.CANCELLED)

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to return, or ranks that share experts wait for this one."""
        return bool(self._sequences or self._completions or self._in_flight or self._replica.is_awake)

    def hear(self, num_batches: int) -> None:
        """See Replica.hear."""
        self._replica.hear(num_batches)

    def beat(self) -> None:
        """Called once in a while, whether there is work or not."""
        self._replica.keep_in_touch()
        if balance := self._replica.expert_balance:
            self.stats.expert_balance, self.stats.num_expert_moves = balance.mean, balance.num_moves
            self.stats.expert_balance_unmoved = balance.mean_unmoved

    def _admit(self) -> None:
        """Let in the sequences whose grammar is ready, then fill the batch."""
        for key in self._grammars.poll():
            for sequence in self._awaiting_grammar.pop(key, []):
                if sequence.status is not SequenceStatus.FINISHED:
                    self._queue(sequence)
        for sequence in self._scheduler.admit():
            if sequence.num_preemptions == 0 and not sequence.branch:
                self.stats.num_prompt_tokens += sequence.num_prompt
                self.stats.num_cached_tokens += sequence.num_cached
        self.stats.num_running = len(self._scheduler.running)
        pool = self._scheduler.pool
        self.stats.num_kv_blocks, self.stats.num_kv_blocks_used = pool.capacity, pool.capacity - pool.num_free
        self.stats.num_waiting = max(0, len(self._sequences) - self.stats.num_running)

    def _launch(self) -> Launched | None:
        """Plan the next step and launch it: forward and draw. None if no sequence is ready."""
        plan = self._plan()
        if self._in_flight and (not plan.runs or self._holds_up_others(self._in_flight)):
            self._collect(self._in_flight)
            self._in_flight = None
            plan = self._plan()
        self._scheduler.carry_out(plan)
        self.stats.num_preemptions += len(plan.preempted)
        if not plan.runs:
            has_stepped = self._replica.stand_by(is_busy=bool(self._sequences or self._scheduler.has_work))
            if self._awaiting_grammar and not has_stepped:
                self._grammars.wait(COMPILE_WAIT_S)
            return None
        drawn = self._in_flight.draw.tokens if self._in_flight and self._in_flight.draw else None
        logits = self._replica.run(plan.runs, drawn)
        self._scheduler.mark_computed(plan)
        self.stats.num_steps += 1
        self.stats.num_batched_tokens += plan.num_tokens
        lookahead = self._replica.lookahead
        runs = [run for run in plan.runs if run.wants_logits]
        if not runs:
            if lookahead:
                lookahead.follow(plan.runs, None)
            return Launched([], None, plan.num_tokens)
        drawn_after = [(run.sequence, ids) for run in runs for ids in run.ahead]
        sequences, ahead = [sequence for sequence, _ in drawn_after], [ids for _, ids in drawn_after]
        started_s = time.perf_counter()
        matchers = [matcher for run in runs for matcher in (run.sequence.matcher, *run.draft.matchers)]
        masks = self._grammars.fill(matchers)  # while the device computes
        self.stats.mask_s += time.perf_counter() - started_s
        branches = launch_branches(logits, sequences)  # before the sampler overwrites the logits
        draw = self._sampler.sample(logits, sequences, masks, ahead)
        for row, (sequence, drafted) in enumerate(drawn_after):
            if not drafted:
                sequence.draw_row = row
                sequence.num_in_flight += 1
        predicted = lookahead.follow(plan.runs, draw.tokens) if lookahead else None
        return Launched(runs, draw, plan.num_tokens, branches, predicted)

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan()
        return self._drafter.extend(plan, self._scheduler.room(plan))

    def _holds_up_others(self, launched: Launched) -> bool:
        """Whether rows must wait for what was drawn while ranks that share experts step: then all rows wait for it.

        Else two halves of the rows would take turns, in a rhythm of their own on each rank, at the price of full steps.
        """
        sequences = (run.sequence for run in launched.runs)
        return self._replica.is_awake and any(sequence.matcher or sequence.draft.stops for sequence in sequences)

    def _collect(self, launched: Launched) -> None:
        """Read what a step drew and end what is done; a row that ended meanwhile is dropped."""
        lookahead, drawn, end = self._replica.lookahead, iter(launched.draw.read() if launched.draw else ()), 0
        goes_on: list[tuple[Sequence, int]] = []  # behind the token drawn in that row, which is their last one
        for run in launched.runs:
            of_run = list(itertools.islice(drawn, 1 + len(run.draft.stops)))
            start, end = end, end + len(of_run)
            if run.sequence.num_void:
                run.sequence.num_void -= 1
                continue
            run.sequence.num_in_flight -= 1
            if not run.sequence.branch and run.sequence.status is not SequenceStatus.FINISHED:
                last = self._take(run, of_run) - 1
                place = run.start + run.num_tokens + (0, *run.draft.stops)[last]
                if lookahead and run.sequence.token_ids[place:].tolist() == [of_run[last][0]]:
                    goes_on.append((run.sequence, start + last))
        if lookahead:
            self._drafter.look_ahead(lookahead, launched.ahead, goes_on, self._scheduler.reserve)
        if launched.branches:
            probes, logprobs = launched.branches
            for probe, of_its_tokens in zip(probes, logprobs.read(), strict=True):
                self._scheduler.finish(probe)
                if completion := self._labels.take(probe, of_its_tokens):
                    self._complete(completion)

    def _take(self, run: Run, drawn: list[tuple[int, float]]) -> int:
        """Extend a sequence by what was drawn for it, as long as its tokens are the draft's; returns how many draws."""
        sequence, draft, thought = run.sequence, run.draft, run.sequence.thought
        num_before, num_taken = len(sequence.token_ids), 0
        sequence.num_draft_tokens += len(draft.stops)
        for (token_id, logprob), stop in zip(drawn, (0, *draft.stops), strict=True):
            if tuple(sequence.token_ids[num_before:]) != draft.token_ids[:stop] or sequence.thought is not thought:
                break
            num_taken += 1
            sequence.num_accepted_tokens += stop > 0
            if error := self._accept(sequence, token_id):
                self._finish(sequence, FinishReason.CONSTRAINT_ERROR if sequence.matcher else FinishReason.ERROR, error)
            elif reason := self._extend(sequence, token_id, logprob=logprob):
                self._finish(sequence, reason)
            if sequence.status is SequenceStatus.FINISHED:
                break
        self.stats.num_draws += 1
        if draft.stops:
            self._drafter.note(draft, num_taken - 1)
            self._scheduler.keep(sequence, draft.token_ids, num_before)
        self._drafter.propose(sequence)
        return num_taken

    def _accept(self, sequence: Sequence, token_id: int) -> str | None:
        """Accept a drawn token; returns why it cannot be accepted."""
        if token_id < 0:
            where = f"after {sequence.num_output} output tokens"
            return f"the constraint allows no token {where}" if sequence.matcher else f"no finite logits {where}"
        if sequence.matcher and not sequence.matcher.accept(token_id):
            return f"the grammar refuses token {token_id}, which its mask allowed"
        sequence.note_drawn()
        return None

    def _extend(self, sequence: Sequence, *drawn: int, logprob: float = 0.0) -> FinishReason | None:
        """Append a drawn token and what the grammar forces after it, or the shortest end if they leave too little room.

        Says if, and why, that is the end. What is forced will be computed with the next draw.
        """
        if sequence.thought:
            self.stats.num_output_tokens += self._thoughts.extend(sequence, drawn, logprob)
            return None if sequence.thought else self._extend(sequence)
        forced = self._forced_after(sequence, drawn)
        token_ids = (*drawn, *forced)
        if sequence.closer and sequence.matcher:
            end = sequence.closer.replace(sequence, sequence.matcher, token_ids)
            if end is not None:
                sequence.num_steered = len(end)
                self._record(sequence, end, (0.0,) * len(end))
                return FinishReason.CLOSED
        self._record(sequence, token_ids, (logprob,) * len(drawn) + (0.0,) * len(forced))
        self.stats.num_forced_tokens += len(forced)
        return self._finish_reason(sequence)

    def _forced_after(self, sequence: Sequence, drawn: Ids) -> Ids:
        matcher = sequence.matcher
        if matcher is None or not sequence.request.sampling.force_text or not matcher.forced_text():
            return ()
        before = (*sequence.token_ids[-CONTEXT_TOKENS:], *drawn)
        return self._forced.advance(matcher, before, sequence.max_tokens - sequence.num_output - len(drawn))

    def _record(self, sequence: Sequence, token_ids: Ids, logprobs: Iterable[float]) -> None:
        sequence.token_ids.extend(token_ids)
        sequence.logprobs.extend(logprobs)
        if sequence.detokenizer:
            sequence.text += "".join(map(sequence.detokenizer.push, token_ids))
        self.stats.num_output_tokens += len(token_ids)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Whether the last token is the end, and why."""
        sampling, token_id = sequence.request.sampling, sequence.token_ids[-1]
        if sequence.matcher and sequence.matcher.is_at_end():
            return FinishReason.STOP
        if sequence.num_answered and token_id in self._text.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if sampling.stop and find_stop(sequence.text, sampling.stop) is not None:
            return FinishReason.STOP
        if sequence.num_output < sequence.max_tokens:
            return None
        return FinishReason.CLOSED if sequence.matcher and sequence.matcher.can_end() else FinishReason.LENGTH

    def _queue(self, sequence: Sequence) -> None:
        """Hand a sequence to the scheduler, or park it until its grammar is compiled."""
        key = sequence.request.constraint_key
        if key is not None:
            try:
                sequence.matcher = self._grammars.matcher(key)
            except ConstraintError as error:
                self._finish(sequence, FinishReason.CONSTRAINT_ERROR, str(error))
                return
            if sequence.matcher is None:
                self._awaiting_grammar[key].append(sequence)
                return
            num_left = sequence.max_tokens - sequence.request.sampling.thinking_budget
            sequence.closer = self._grammars.closer(key, num_left)
        self._thoughts.begin(sequence)
        if reason := self._extend(sequence):
            self._finish(sequence, reason)
            return
        self._scheduler.add(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Take a sequence out of the engine and make its completion; one whose labels are ranked follows later."""
        self._scheduler.finish(sequence)
        sampling, output_ids = sequence.request.sampling, sequence.output_ids
        completion = Completion(
            request_id=sequence.request.request_id,
            finish_reason=reason,
            text=self._answer(sequence),
            reasoning=self._thoughts.reasoning(sequence),
            num_reasoning_tokens=sequence.num_thought,
            token_ids=tuple(output_ids),
            logprobs=tuple(sequence.logprobs) if sampling.logprobs else None,
            error=error,
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.num_cached,
            num_draft_tokens=sequence.num_draft_tokens,
            num_accepted_tokens=sequence.num_accepted_tokens,
            seconds=sequence.seconds,
            first_token_s=sequence.first_token_s,
        )
        probes: list[Sequence] = []
        if (key := sequence.request.constraint_key) and reason in (FinishReason.STOP, FinishReason.CLOSED):
            constraint, tokens = self._grammars.spelling(key)
            completion, probes = self._labels.add_to(completion, sequence, constraint, tokens)
        for probe in probes:
            self._scheduler.add(probe)
        if not probes:
            self._complete(completion)

    def _complete(self, completion: Completion) -> None:
        del self._sequences[completion.request_id]
        self.stats.num_finished += 1
        self._completions.append(completion)

    def _answer(self, sequence: Sequence) -> str:
        """The answer as text, up to the first stop string; blanks between thinking and a free answer are of neither."""
        stop = find_stop(sequence.text, sequence.request.sampling.stop)
        text = self._text.decode(sequence.token_ids[sequence.answer_start :]) if stop is None else sequence.text[:stop]
        return text.lstrip() if sequence.num_thought and not sequence.matcher else text

    def _reject(self, request: Request, reason: FinishReason, error: str, num_prompt: int = 0) -> None:
        self.stats.num_finished += 1
        self._completions.append(
            Completion(request_id=request.request_id, finish_reason=reason, error=error, num_prompt_tokens=num_prompt)
        )
