"""The prefix cache on = off: the same tokens, by the equality rule, whatever is known, copied, evicted or preempted.

The numerics differ (other chunks, other batches), so tokens may part at near ties only. Free KV is NaN at the start.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.results import GenerationResult, collect_results
from engine.sampling_params import SamplingParams
from tests.engine.equality import check_equal_by_rule
from tests.engine.models import make_model
from tests.engine.test_equality import Reference, engine_of, prompts_of, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, but with enough of attention that wrong KV changes its tokens."""
    return make_model(
        tmp_path_factory.mktemp("model"),
        request.param,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )


def one_by_one(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[GenerationResult]:
    results = []
    for prompt, its_params in zip(prompts, params, strict=True):
        results += engine.generate([prompt], its_params)
        engine.check()
    return results


def cached_tokens(results: list[GenerationResult]) -> list[int]:
    return [result.usage.cached_prompt_tokens for result in results if result.usage is not None]


def params_for(count: int, max_tokens: int = 8) -> list[SamplingParams]:
    """Greedy and seeded in turn."""
    return [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=max_tokens) for i in range(count)]


def check_on_equals_off(
    model_dir: Path, device: str, prompts: list[list[int]], params: list[SamplingParams], **options: Any
) -> list[int]:
    """Runs the prompts one after the other. Returns how many tokens of each were cached."""
    off = engine_of(model_dir, device, prefix_cache=False, **options)
    expected = tokens_of(one_by_one(off, prompts, params))
    on = engine_of(model_dir, device, **options)
    results = one_by_one(on, prompts, params)
    check_equal_by_rule(tokens_of(results), expected, Reference(model_dir, prompts, params))
    cached = cached_tokens(results)
    assert on.load().prompt_tokens_computed == sum(map(len, prompts)) - sum(cached)
    assert off.load().prompt_tokens_computed == sum(map(len, prompts))
    assert on.load().kv_blocks_used == 0
    return cached


@pytest.mark.parametrize("block_size", [8, 16])
def test_shared_prefixes_of_every_length(model_dir: Path, device: str, block_size: int) -> None:
    """From a whole prompt down to nothing, so that the newest of those that begin alike is the one most alike."""
    whole, *others = prompts_of([4 * block_size] * (3 * block_size + 7))
    shared = range(3 * block_size + 5, -1, -1)
    tails = [other[: block_size + 1] for other in others]
    prompts = [whole] + [whole[:length] + tail for length, tail in zip(shared, tails, strict=True)]
    cached = check_on_equals_off(model_dir, device, prompts, params_for(len(prompts)), block_size=block_size)
    expected = [length if length % block_size >= 4 else length // block_size * block_size for length in shared]
    assert cached == [0, *expected]


@pytest.mark.parametrize("block_size", [8, 16])
def test_known_prompts_of_every_length_again(model_dir: Path, device: str, block_size: int) -> None:
    """All but the last token is known: exact multiples of the block size, one more, one less."""
    lengths = [1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size - 1, 2 * block_size, 2 * block_size + 1]
    prompts = [prompt for prompt in prompts_of(lengths, seed=block_size) for _ in range(3)]
    params = [its for its in params_for(len(lengths)) for _ in range(3)]
    cached = check_on_equals_off(model_dir, device, prompts, params, block_size=block_size)
    assert cached[::3] == [0] * len(lengths)
    # Of the last length but two the block that goes on is known by the answer to the first time.
    again = [0, 0, 0, 0, block_size, 2 * block_size - 2, 2 * block_size - 1, 2 * block_size]
    assert cached[1::3] == cached[2::3] == again


@pytest.mark.parametrize("block_size", [8, 16])
def test_chats_whose_answers_are_part_of_the_next_prompt(model_dir: Path, device: str, block_size: int) -> None:
    """The history is what the engine without a cache said."""
    off = engine_of(model_dir, device, prefix_cache=False)
    prompts, params = [], []
    for chat in range(3):
        history = prompts_of([21], seed=chat)[0]
        for turn, message in enumerate(prompts_of([5, 13, 2, 16], seed=10 + chat)):
            history = history + message
            prompts.append(history)
            params.append(SamplingParams(temperature=0.8 * (chat % 2), seed=turn, max_tokens=14, ignore_eos=True))
            history = history + off.generate([history], params[-1])[0].token_ids
    cached = check_on_equals_off(model_dir, device, prompts, params, block_size=block_size)
    for turn, tokens in enumerate(cached):
        before = len(prompts[turn - 1]) + 14 if turn % 4 else 0
        assert tokens >= max(before - 1, 0) // block_size * block_size


def branching_prompts(count: int) -> list[list[int]]:
    """A few stems that part again and again, mostly within blocks."""
    rng = random.Random(5)
    prompts = prompts_of([40, 61, 16])
    while len(prompts) < count:
        stem = rng.choice(prompts)
        prompts.append(stem[: rng.randint(0, len(stem))][:70] + rng.choices(range(2, 512), k=rng.randint(1, 20)))
    rng.shuffle(prompts)
    return prompts


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_pool_so_small_that_all_is_evicted_and_preempted_all_the_time(
    model_dir: Path, device: str, block_size: int, depth: int
) -> None:
    prompts = branching_prompts(50)
    params = params_for(len(prompts), max_tokens=20)
    roomy = engine_of(model_dir, device, prefix_cache=False)
    expected = tokens_of(roomy.generate(prompts, params))
    blocks = 256 // block_size
    options: dict[str, Any] = {"max_num_batched_tokens": 48, "pipeline_depth": depth, "block_size": block_size}
    tight = engine_of(model_dir, device, num_gpu_blocks=blocks, max_num_seqs=12, **options)
    for i, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
        tight.add(str(i), prompt, its_params)
    events = []
    while tight.has_work():
        events += tight.step().events
        tight.check()
    results = collect_results(events, len(prompts))
    check_equal_by_rule(tokens_of(results), expected, Reference(model_dir, prompts, params))
    load, stats = tight.load(), tight.load().prefix_cache
    assert stats is not None
    assert load.preemptions > 5
    assert stats.evicted_blocks > 2 * blocks
    assert stats.hits > 10
    assert stats.copies > 3
    assert load.kv_blocks_used == 0
    assert tight.block_manager.num_free + load.kv_blocks_cached == blocks


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_at_once_share_and_part(model_dir: Path, device: str, depth: int) -> None:
    """With room enough, in waves: all of one wave are admitted together, and find what the waves before left."""
    prompts = branching_prompts(40)
    params = params_for(len(prompts), max_tokens=12)
    results: dict[bool, list[list[int]]] = {}
    for on in (False, True):
        engine = engine_of(model_dir, device, prefix_cache=on, pipeline_depth=depth)
        results[on] = []
        for start in range(0, len(prompts), 10):
            wave = slice(start, start + 10)
            results[on] += tokens_of(engine.generate(prompts[wave], params[wave]))
            engine.check()
    stats = engine.load().prefix_cache
    assert stats is not None
    assert stats.hits > 10
    check_equal_by_rule(results[True], results[False], Reference(model_dir, prompts, params))
    assert len({tuple(tokens) for tokens in results[True]}) > len(prompts) // 2, "a model this dull would hide errors"


def test_forks_of_a_cached_prompt(model_dir: Path, device: str) -> None:
    """Each output on its own, with seeds: compared with the same request where nothing is known."""
    prompts = [prompt[:length] for prompt in prompts_of([48] * 2) for length in (48, 40, 37, 33)]
    params = [SamplingParams(temperature=0.9, seed=i, n=3, max_tokens=12, ignore_eos=True) for i in range(len(prompts))]
    off = one_by_one(engine_of(model_dir, device, prefix_cache=False), prompts, params)
    on = one_by_one(engine_of(model_dir, device), prompts, params)
    assert cached_tokens(on) == [0, 39, 36, 32] * 2
    pairs = [pair for one, other in zip(off, on, strict=True) for pair in zip(one.outputs, other.outputs, strict=True)]
    assert sum(one.token_ids == other.token_ids for one, other in pairs) >= 0.95 * len(pairs)


def test_salts_and_bypass_compute_all(model_dir: Path, device: str) -> None:
    engine = engine_of(model_dir, device)
    (prompt,) = prompts_of([48])
    told: list[int] = []
    a, b = {"cache_salt": "a"}, {"cache_salt": "b"}
    each: list[dict[str, Any]] = [{}, a, b, {"bypass_prefix_cache": True}, a, {}]
    for i, options in enumerate(each):
        before = engine.load().prompt_tokens_computed
        engine.add(str(i), prompt, GREEDY, **options)
        while engine.has_work():
            engine.step()
        told.append(engine.load().prompt_tokens_computed - before)
    assert told == [48, 48, 48, 48, 1, 1]
    assert engine.flush_cache() == 3 * 3
    assert engine.load().kv_blocks_cached == 0


def test_what_is_copied_is_the_known_block_bit_for_bit(model_dir: Path, device: str) -> None:
    """A partly known block: its known tokens are those of the source, the rest is the new prompt's own."""
    engine = engine_of(model_dir, device)
    first, second = prompts_of([32, 32])
    prompt = first[:26] + second[:6]
    engine.generate([first], GREEDY)
    pool = engine._runner.kv_cache
    before = pool.clone()
    engine.add("a", prompt, GREEDY)
    engine.step()
    (request,) = engine._lifecycle.live.values()
    cache = request.outputs[0].cache
    assert cache is not None
    assert request.cached_prompt_tokens == 26
    shared, own = cache.physical_blocks[:2]
    source = next(b for b in range(pool.shape[2]) if torch.equal(before[:, :, b, :10], pool[:, :, own, :10]))
    assert source != own
    assert torch.equal(pool[:, :, source], before[:, :, source])
    assert torch.equal(pool[:, :, shared], before[:, :, shared])
    assert not pool[:, :, own].isnan().any()
    assert not torch.equal(pool[:, :, own, 10], before[:, :, source, 10])


@pytest.mark.slow
def test_a_chat_with_smollm2(smollm2_dir: Path, device: str) -> None:
    prompts, params = [], []
    off = engine_of(smollm2_dir, device, prefix_cache=False)
    history = random.Random(0).choices(range(100, 49000), k=150)
    for turn in range(3):
        prompts.append(history)
        params.append(SamplingParams(temperature=0.7 * (turn % 2), seed=turn, max_tokens=24, ignore_eos=True))
        history = history + off.generate([history], params[-1])[0].token_ids
        history = history + random.Random(turn).choices(range(100, 49000), k=19)
    prompts += [prompts[1][:134] + prompts[2][:10], prompts[0]]
    params += [GREEDY, GREEDY]
    cached = check_on_equals_off(smollm2_dir, device, prompts, params)
    assert cached == [0, 160, 208, 134, 149]
