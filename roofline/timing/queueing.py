"""The steps of a run whose requests all wait at the start, one after the other as the engine's scheduler takes them."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from roofline.timing.scheduling import Group, Scheduler, merged

_EVEN: Final = 0.618  # of the count, the stride by which outputs are shuffled against prompts: 1 / golden ratio


def queue_groups(
    requests: Sequence[tuple[int, int]], places: int, pool_tokens: float, scheduler: Scheduler
) -> list[Group]:
    """All requests (prompt, output) wait at the start; first come, first served, as places and the KV pool allow.

    A request enters when the pool has room for its prompt and the charged part of its output. Where the pool fills up
    all the same, the last one that entered pauses; what it loses of its cache is left out. Chunks of prompts share a
    step with decodes, or decodes wait, as the scheduler says.
    """
    return _Queue(requests, places, pool_tokens, scheduler).groups()


def spread_lengths(mean_prompt: int, mean_output: int, count: int, widest: float) -> list[tuple[int, int]]:
    """`count` requests with these mean lengths, the longest about `widest` times the mean.

    Up to twice the mean lengths spread evenly around it, beyond they fall off exponentially. Outputs are shuffled
    against prompts by a fixed stride, so that a run is the same each time.
    """
    shares = [_quantile((index + 0.5) / count, widest) for index in range(count)]
    scale = count / sum(shares)
    first, second = _coprime(count, _EVEN), _coprime(count, 1 - _EVEN)

    def length(mean: int, index: int) -> int:
        return max(1, round(mean * scale * shares[index % count]))

    return [(length(mean_prompt, index * second), length(mean_output, index * first)) for index in range(count)]


def _quantile(share: float, widest: float) -> float:
    """The length over the mean below which a share of requests lies."""
    if widest <= 2:
        return 2 - widest + 2 * (widest - 1) * share
    return -math.log(1 - share * (1 - math.exp(-widest)))


def _coprime(count: int, share: float) -> int:
    return next(step for step in range(round(count * share) | 1, 4 * count + 4, 2) if math.gcd(step, count) == 1)


@dataclass
class _Waiting:
    prompt: int
    output: int
    taken: int = 0  # tokens of the prompt that are done
    resumes: bool = False  # it paused while it decoded; its `prompt` is in the cache


@dataclass
class _Chunk:
    tokens: int
    reached: int


class _Queue:
    """The state between two steps. Lengths are kept as of step 0 of the clock, which counts steps that decode."""

    def __init__(
        self, requests: Sequence[tuple[int, int]], places: int, pool_tokens: float, scheduler: Scheduler
    ) -> None:
        self.waiting = deque(_Waiting(prompt, output) for prompt, output in requests)
        self.places, self.pool, self.scheduler = places, pool_tokens, scheduler
        self.clock = 0
        self.running: dict[int, tuple[int, int]] = {}  # by order of entry: tokens attended at clock 0, last step
        self.ends: list[tuple[int, int]] = []  # (last step, entry), also of those that paused
        self.attended = self.last_steps = 0  # sums over the running
        self.partial: _Waiting | None = None  # a prompt of which chunks are done
        self.entries = 0
        self.steps: list[Group] = []

    def groups(self) -> list[Group]:
        while self.waiting or self.running or self.partial:
            self.pause()
            chunks, entering = self.take_prompts()
            if chunks:
                self.prompt_step(chunks, entering)
            else:
                self.decode_steps()
            self.leave()
        return merged(self.steps)

    def held(self) -> float:
        """Tokens in the pool before the next step, which adds one for each running sequence."""
        decoding = self.attended + (self.clock - 1) * len(self.running)
        return decoding + (self.partial.taken if self.partial else 0)

    def pause(self) -> None:
        while len(self.running) > 1 and self.held() + len(self.running) > self.pool:
            entry = next(reversed(self.running))
            attended, last = self.remove(entry)
            self.waiting.appendleft(_Waiting(attended + self.clock, last - self.clock, resumes=True))

    def has_room(self, request: _Waiting, more: int) -> bool:
        """Whether a request may enter beside the running and `more` tokens that enter with it."""
        running = len(self.running)
        charged = self.scheduler.charged_output
        left = self.last_steps - running * self.clock
        need = self.held() + more + request.prompt + max(running, 1) + charged * (left + request.output)
        return need <= self.pool

    def take_prompts(self) -> tuple[list[_Chunk], list[_Waiting]]:
        """The chunks of the next step, and the requests whose prompts they end."""
        room = self.scheduler.max_num_batched_tokens - (len(self.running) if self.scheduler.mixes else 0)
        chunks: list[_Chunk] = []
        entering: list[_Waiting] = []
        more = 0
        while room > 0:
            request = self.partial or self.next_waiting(len(entering), more, bool(chunks))
            if request is None:
                break
            if request.resumes:
                self.enter(request)
                room -= 1
                continue
            tokens = min(room, request.prompt - request.taken)
            request.taken += tokens
            room -= tokens
            chunks.append(_Chunk(tokens, request.taken))
            done = request.taken >= request.prompt
            self.partial = None if done else request
            if done:
                entering.append(request)
                more += request.prompt + round(self.scheduler.charged_output * request.output)
        return chunks, entering

    def next_waiting(self, entering: int, more: int, has_chunks: bool) -> _Waiting | None:
        if not self.waiting or len(self.running) + entering >= self.places:
            return None
        alone = not self.running and not has_chunks
        if not alone and not self.has_room(self.waiting[0], more):
            return None
        return self.waiting.popleft()

    def prompt_step(self, chunks: Sequence[_Chunk], entering: Sequence[_Waiting]) -> None:
        tokens = sum(chunk.tokens for chunk in chunks)
        reached = sum(chunk.tokens * chunk.reached for chunk in chunks) / tokens
        decodes = len(self.running) if self.scheduler.mixes else 0
        self.steps.append(Group(1, decodes, self.context(), len(chunks), tokens / len(chunks), reached))
        self.clock += 1 if decodes else 0
        for request in entering:
            self.enter(_Waiting(request.prompt + 1, request.output - 1))

    def enter(self, request: _Waiting) -> None:
        """Has a request decode from the next step on, where it attends `prompt` tokens."""
        if request.output < 1:
            return
        attended, last = request.prompt - self.clock, self.clock + request.output
        self.running[self.entries] = attended, last
        heapq.heappush(self.ends, (last, self.entries))
        self.attended += attended
        self.last_steps += last
        self.entries += 1

    def context(self) -> float:
        """Tokens that a running sequence attends in the next step, on average."""
        return self.attended / len(self.running) + self.clock if self.running else 1.0

    def decode_steps(self) -> None:
        """Decodes until a sequence ends or the pool is full."""
        if not self.running:
            return
        running = len(self.running)
        left = self.next_end() - self.clock
        fits = int((self.pool - self.held()) // running) if running > 1 else left
        steps = max(1, min(left, fits))
        self.steps.append(Group(steps, running, self.context() + (steps - 1) / 2))
        self.clock += steps

    def next_end(self) -> int:
        while self.ends[0][1] not in self.running:
            heapq.heappop(self.ends)
        return self.ends[0][0]

    def leave(self) -> None:
        while self.running and self.next_end() <= self.clock:
            self.remove(heapq.heappop(self.ends)[1])

    def remove(self, entry: int) -> tuple[int, int]:
        attended, last = self.running.pop(entry)
        self.attended -= attended
        self.last_steps -= last
        return attended, last
