"""Two ways to the same tokens: alone and batched, chunked and whole, preempted and not, ahead and plain.

Same kernels on the same shapes are compared bit for bit, all else by the equality rule (`tests.engine.equality`).
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.naive import RecomputeDecoder, load_naive
from engine.outputs import Event, FailReason, OutputFinished, RequestDone, TokenOutput
from engine.results import GenerationResult
from engine.sampling_params import LogprobsMode, SamplingParams
from kernels.reference.sampling import gumbel_noise, signed64
from tests.engine.equality import check_equal_by_rule
from tests.engine.models import make_model

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 64, 100, 150]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("model"), "llama", hidden_size=192, num_attention_heads=6, num_key_value_heads=3
    )


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(2, 512), k=length) for length in lengths]


def engine_of(model_dir: Path, device: str, **options: Any) -> Engine:
    settings: dict[str, Any] = {"num_gpu_blocks": 256, "dtype": "float32", "pipeline_depth": 1}
    engine = Engine(EngineConfig(model=str(model_dir), device=device, **(settings | options)))
    # Free KV may hold anything: nothing may read it.
    engine._runner.kv_cache.fill_(float("nan"))
    return engine


def mixed_params(count: int, **common: Any) -> list[SamplingParams]:
    """Greedy and seeded in turn."""
    return [
        SamplingParams(temperature=0 if i % 2 else 0.8, seed=1000 + i, max_tokens=24, **common) for i in range(count)
    ]


class Reference:
    """The scores a token was chosen by, from the naive decoder: logits over temperature, plus noise if seeded."""

    def __init__(self, model_dir: Path, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        self._decoder = RecomputeDecoder(*load_naive(model_dir))
        self._prompts, self._params = prompts, params

    def __call__(self, i: int, tokens: list[int]) -> torch.Tensor:
        sequence = self._prompts[i] + tokens
        with torch.inference_mode():
            logits, _ = self._decoder._model.forward(sequence, None)
        params = self._params[i]
        if params.temperature == 0:
            return logits
        seed = torch.tensor([signed64(params.seed or 0)])
        noise = gumbel_noise(seed, torch.tensor([len(sequence)]), len(logits))[0]
        return logits / params.temperature + noise


def tokens_of(results: list[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


def test_a_row_of_a_batch_equals_the_request_alone(model_dir: Path, device: str) -> None:
    prompts, params = prompts_of(LENGTHS), mixed_params(len(LENGTHS))
    engine = engine_of(model_dir, device)
    together = tokens_of(engine.generate(prompts, params))
    alone = [engine.generate([prompt], [p])[0].token_ids for prompt, p in zip(prompts, params, strict=True)]
    check_equal_by_rule(together, alone, Reference(model_dir, prompts, params))
    assert len({tuple(tokens) for tokens in together}) > len(prompts) // 2, "a model this dull would hide errors"


@pytest.mark.parametrize("chunk", [5, 16, 33])
def test_a_chunked_prompt_equals_a_whole_one(model_dir: Path, device: str, chunk: int) -> None:
    prompts, params = prompts_of(LENGTHS), mixed_params(len(LENGTHS))
    whole = tokens_of(engine_of(model_dir, device).generate(prompts, params))
    engine = engine_of(model_dir, device, max_num_batched_tokens=chunk, max_num_seqs=5)
    chunked = tokens_of(engine.generate(prompts, params))
    check_equal_by_rule(chunked, whole, Reference(model_dir, prompts, params))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_equals_one_that_was_not(model_dir: Path, device: str, depth: int) -> None:
    prompts, params = prompts_of(list(range(20, 30))), mixed_params(10)
    roomy = tokens_of(engine_of(model_dir, device).generate(prompts, params))
    tight = engine_of(model_dir, device, num_gpu_blocks=24, block_size=8, pipeline_depth=depth)
    results = tight.generate(prompts, params)
    assert tight.load().preemptions > 3, "the pool was not tight enough to preempt"
    check_equal_by_rule(tokens_of(results), roomy, Reference(model_dir, prompts, params))
    assert tight.load().kv_blocks_used == 0


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_sizes_give_the_same_bits(model_dir: Path, device: str, block_size: int) -> None:
    """The gathered KV is the same whatever the blocks, so even logprobs agree to the last bit."""
    prompts = prompts_of(LENGTHS)
    params = [SamplingParams(temperature=0, max_tokens=12, top_logprobs=2) for _ in prompts]
    one = engine_of(model_dir, device, block_size=16).generate(prompts, params)
    other = engine_of(model_dir, device, block_size=block_size).generate(prompts, params)
    assert [r.outputs for r in one] == [r.outputs for r in other]


def test_depth_two_gives_the_bits_of_depth_one_when_max_tokens_ends_all(model_dir: Path, device: str) -> None:
    """Same admissions, same shapes: everything must agree, logprobs included."""
    prompts = prompts_of(LENGTHS)
    features: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
        {"min_tokens": 10, "stop_token_ids": (5,), "logit_bias": ((5, -100.0),)},
        {"logit_bias": ((7, 3.0), (9, -5.0)), "top_k": 20},
        {"top_logprobs": 3, "logprobs_mode": LogprobsMode.PROCESSED, "top_p": 0.9},
        {"top_logprobs": 0, "prompt_logprobs": 2},
        {"n": 3, "top_p": 0.95},
        {"n": 2, "min_p": 0.02, "presence_penalty": 1.0},
        {"max_tokens": 1},
        {"max_tokens": 0, "prompt_logprobs": 0},
    ]
    params = [
        SamplingParams(**({"seed": i, "max_tokens": 9 + i, "ignore_eos": True} | feature))
        for i, feature in enumerate(features)
    ]
    options: dict[str, Any] = {"max_num_batched_tokens": 64}
    plain = engine_of(model_dir, device, pipeline_depth=1, **options).generate(prompts, params)
    ahead = engine_of(model_dir, device, pipeline_depth=2, **options).generate(prompts, params)
    assert plain == ahead


def test_depth_two_equals_depth_one_with_stops_and_aborts(model_dir: Path, device: str) -> None:
    """EOS, stop ids, stop strings and aborts change which rows share a step, so this goes by the rule."""
    prompts = prompts_of(LENGTHS)
    rng = random.Random(3)
    params = [
        SamplingParams(
            temperature=0 if i % 2 else 1.0,
            seed=i,
            max_tokens=40,
            stop_token_ids=tuple(rng.sample(range(512), 20)),
        )
        for i in range(len(prompts))
    ]
    plain, plain_ends = run_with_interference(engine_of(model_dir, device, pipeline_depth=1), prompts, params)
    ahead, ahead_ends = run_with_interference(engine_of(model_dir, device, pipeline_depth=2), prompts, params)
    assert plain_ends == ahead_ends
    check_equal_by_rule(ahead, plain, Reference(model_dir, prompts, params))


def run_with_interference(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[list[int]], list[object]]:
    """Requests 2 and 7 are aborted after 6 tokens, 3 and 8 ended "by a stop string" after 5 of 8 tokens."""
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(i), prompt, p)
    tokens: list[list[int]] = [[] for _ in prompts]
    ends: list[object] = [None] * len(prompts)
    while engine.has_work():
        for event in engine.step().events:
            i = int(event.request_id)
            if isinstance(event, TokenOutput) and ends[i] is None:
                tokens[i].append(event.token_id)
                if i in (2, 7) and len(tokens[i]) == 6:
                    engine.cancel(str(i))
                    ends[i] = FailReason.CANCELLED
                if i in (3, 8) and len(tokens[i]) == 8:
                    engine.finish_output(str(i), 0, 5)
                    tokens[i], ends[i] = tokens[i][:5], "stop string"
            elif isinstance(event, OutputFinished) and ends[i] is None:
                ends[i] = event.reason
            elif isinstance(event, RequestDone) and ends[i] == "stop string":
                assert event.usage.completion_tokens == (5,)
        engine.check()
    return tokens, ends


def test_forked_outputs_equal_requests_of_their_own_after_preemption(model_dir: Path, device: str) -> None:
    prompts = prompts_of([30, 45])
    params = [SamplingParams(temperature=0.9, seed=i, n=4, max_tokens=20) for i in range(2)]
    roomy = engine_of(model_dir, device).generate(prompts, params)
    tight = engine_of(model_dir, device, num_gpu_blocks=13)
    squeezed = tight.generate(prompts, params)
    assert tight.load().preemptions > 0
    for i in range(2):
        one, other = ([output.token_ids for output in r[i].outputs] for r in (roomy, squeezed))
        same = sum(a == b for a, b in zip(one, other, strict=True))
        assert same >= 3
        assert len({tuple(tokens) for tokens in one}) == 4
    tight.check()


def damage_nothing(kv_cache: torch.Tensor) -> None: ...


def zero_all(kv_cache: torch.Tensor) -> None:
    kv_cache.nan_to_num_().zero_()


def swap_value_blocks(kv_cache: torch.Tensor) -> None:
    """Of V alone: attention does not see the order of whole blocks, because K carries its position."""
    kv_cache[:, 1, [0, 1]] = kv_cache[:, 1, [1, 0]].clone()


def swap_heads(kv_cache: torch.Tensor) -> None:
    kv_cache[..., [0, 1], :] = kv_cache[..., [1, 0], :].clone()


@pytest.mark.parametrize("damage", [zero_all, swap_value_blocks, swap_heads])
def test_the_tiny_model_notices_wrong_kv(tiny_dir: Path, device: str, damage: Any) -> None:
    """The model of all serving tests must change its text when its KV is wrong, or those tests prove nothing."""
    prompt = random.Random(0).choices(range(17, 49152), k=60)

    def greedy(change: Any) -> list[int]:
        engine = engine_of(tiny_dir, device, num_gpu_blocks=16)
        engine.add("a", prompt, SamplingParams(temperature=0, max_tokens=24))
        tokens: list[int] = []
        events: list[Event] = []
        while engine.has_work():
            events = engine.step().events
            if not tokens:
                change(engine._runner.kv_cache)
            tokens += [event.token_id for event in events if isinstance(event, TokenOutput)]
        return tokens

    assert greedy(damage) != greedy(damage_nothing)
