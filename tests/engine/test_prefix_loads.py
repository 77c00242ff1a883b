"""Random loads of a scheduler with a prefix cache: whatever happens to requests, every read of KV is their own.

Tokens are few, so that prompts and answers meet, part and meet again; the pool is small, so that all are short of it.
"""

from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.outputs import FailReason, TokenOutput
from engine.request import Request, State
from engine.scheduler import _badness
from tests.engine.driver import EOS
from tests.engine.prefix_driver import PrefixDriver

POOL = 16


def next_token(request_id: str, output: int, position: int) -> int:
    """Few tokens, so that answers are alike, too; and an EOS now and then."""
    draw = crc32(f"{request_id}/{output}/{position}".encode()) % 12
    return EOS if draw == 0 else draw % 2 + 1


class LoadMachine(RuleBasedStateMachine):
    """A scheduler under all that can happen to requests, with a device that checks every read."""

    @initialize(size=st.sampled_from([2, 3, 4]), depth=st.integers(1, 2), budget=st.sampled_from([5, 9, 32]))
    def make(self, size: int, depth: int, budget: int) -> None:
        self.driver = PrefixDriver(POOL, size, 5, budget, depth, next_token)
        self.requests: dict[str, Request] = {}
        self.stopped: dict[str, int] = {}

    @rule(data=st.data(), more=st.lists(st.integers(1, 2), min_size=1, max_size=16), like=st.sampled_from([0, 1, 2]))
    def ask(self, data: st.DataObject, more: list[int], like: int) -> None:
        head: list[int] = []
        if self.requests and like:
            other = data.draw(st.sampled_from(list(self.requests.values())))
            head = other.prompt + other.outputs[0].token_ids
            head = head[: len(head) - data.draw(st.integers(0, len(head)))]
        self._ask((head + more)[:24], data)

    def _ask(self, prompt: list[int], data: st.DataObject) -> None:
        max_tokens, n = data.draw(st.integers(0, 10)), data.draw(st.sampled_from([1, 1, 1, 2, 3]))
        shared = len(prompt) // self.driver.block_size
        if shared + n * (self.driver.manager.blocks_for(len(prompt) + max_tokens) - shared) > POOL:
            return
        name = f"r{len(self.requests)}"
        self.requests[name] = self.driver.ask(
            name,
            prompt,
            max_tokens,
            n=n,
            cache_root=data.draw(st.sampled_from([b"", b"", b"", b"a", None])),
            priority=data.draw(st.integers(0, 1)),
            tenant=data.draw(st.sampled_from("xy")),
            prompt_logprobs=data.draw(st.sampled_from([None] * 5 + [0])),
        )
        if data.draw(st.sampled_from([False] * 7 + [True])):
            self.driver.nan.add((name, 0, len(prompt) + max_tokens // 2))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.life.live)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "stop", "preempt", "preempt"]))
    def interfere(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(list(self.driver.life.live.values())))
        output = data.draw(st.sampled_from(request.outputs))
        if how == "cancel":
            self.driver.life.fail(request, FailReason.CANCELLED, "", self.driver.now)
        elif how == "stop" and output.token_ids and output.state is not State.FINISHED:
            count = data.draw(st.integers(1, len(output.token_ids)))
            self.driver.life.finish_output(output, count, self.driver.now)
        elif how == "preempt" and self.driver.scheduler.running:
            self.driver.scheduler._preempt(max(self.driver.scheduler.running, key=_badness))
        self.driver.check()

    @rule(what=st.sampled_from(["nothing"] * 4 + ["some", "some", "all"]))
    def forget(self, what: str) -> None:
        if what == "some":
            self.driver.cache.evict(self.driver.cache.num_cached_blocks // 2)
        elif what == "all":
            self.driver.cache.flush()
        self.driver.check()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.step()
        self.driver.run(2000)
        assert set(self.driver.done()) == set(self.requests)
        for name, request in self.requests.items():
            assert request.cached_prompt_tokens < len(request.prompt)
            for output in request.outputs:
                told = [
                    event.token_id
                    for event in self.driver.events
                    if isinstance(event, TokenOutput) and (event.request_id, event.output_index) == (name, output.index)
                ]
                positions = range(len(request.prompt), len(request.prompt) + len(told))
                assert told == [next_token(name, output.index, position) for position in positions]
        assert self.driver.cache.evict(self.driver.cache.num_blocks)
        assert self.driver.manager.num_free == POOL
        assert self.driver.cache._tree._roots == {}


TestLoadMachine = LoadMachine.TestCase
TestLoadMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


class LongLoadMachine(LoadMachine):
    pass


TestLongLoadMachine = pytest.mark.slow(LongLoadMachine.TestCase)
LongLoadMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
