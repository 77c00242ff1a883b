"""Logprobs of generated and of prompt tokens against log-softmax of the naive model's logits."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import (
    Event,
    FailReason,
    FinishReason,
    OutputFinished,
    PromptLogprobs,
    RequestDone,
    Started,
    TokenLogprob,
    TokenOutput,
)
from engine.request import Output
from engine.sampling_params import LogprobsMode, SamplingParams
from tests.engine.models import make_model
from tests.engine.sampling_oracle import Oracle, check_record

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 1
LENGTHS = [1, 2, 15, 16, 17, 64, 100]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Oracle:
    return Oracle(model_dir, EOS)


def engine_of(model_dir: Path, device: str, **options: Any) -> Engine:
    settings: dict[str, Any] = {"num_gpu_blocks": 256, "dtype": "float32"}
    return Engine(EngineConfig(model=str(model_dir), device=device, **(settings | options)))


def prompts_of(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(2)
    return [rng.choices(range(2, 512), k=length) for length in lengths]


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[Event]]:
    """Each request's events, in order."""
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(i), prompt, p)
    events: list[list[Event]] = [[] for _ in prompts]
    while engine.has_work():
        for event in engine.step().events:
            events[int(event.request_id)].append(event)
        engine.check()
    return events


def check_prompt(events: list[Event], prompt: list[int], top: int, oracle: Oracle) -> None:
    """Every position once and in order, before any token; position 0 is predicted by nothing."""
    chunks = [event for event in events if isinstance(event, PromptLogprobs)]
    assert isinstance(events[0], Started)
    assert events[1 : 1 + len(chunks)] == chunks
    entries: list[TokenLogprob] = []
    for chunk in chunks:
        assert chunk.entries, "an empty event says nothing"
        assert chunk.token_offset == len(entries)
        entries += chunk.entries
    assert len(entries) == len(prompt)
    assert entries[0] == TokenLogprob(prompt[0], None, None)
    logits = oracle.logits(prompt)
    for position in range(1, len(prompt)):
        check_record(entries[position], prompt[position], logits[position - 1], top)


@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("mode", LogprobsMode)
def test_logprobs_of_generated_tokens(
    model_dir: Path, oracle: Oracle, device: str, mode: LogprobsMode, top: int
) -> None:
    """RAW sees the model's logits alone; PROCESSED what was drawn from, so cut tokens are not in its top list."""
    common: dict[str, Any] = {"max_tokens": 8, "top_logprobs": top, "logprobs_mode": mode}
    features: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_k": 1},
        {"top_p": 0.7, "min_p": 0.05, "temperature": 1.4},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5, "n": 2},
        {"logit_bias": ((7, 5.0), (8, -100.0)), "min_tokens": 4, "stop_token_ids": (9, 10)},
    ]
    prompts = prompts_of(LENGTHS)
    params = [SamplingParams(**(common | {"seed": i} | feature)) for i, feature in enumerate(features)]
    for prompt, p, events in zip(prompts, params, run(engine_of(model_dir, device), prompts, params), strict=True):
        for index in range(p.n):
            outputs = [event for event in events if isinstance(event, TokenOutput) and event.output_index == index]
            tokens = [event.token_id for event in outputs]
            logits = oracle.logits(prompt + tokens)[len(prompt) - 1 :]
            for i, event in enumerate(outputs):
                seen = logits[i]
                if mode is LogprobsMode.PROCESSED:
                    seen, _ = oracle.processed(seen, prompt, tokens[:i], p)
                assert event.logprob is not None
                check_record(event.logprob, event.token_id, seen, top)


def test_rows_of_a_batch_ask_for_different_things(model_dir: Path, oracle: Oracle, device: str) -> None:
    """Both modes, other numbers of alternatives and none at all, next to each other."""
    features: list[dict[str, Any]] = [
        {"top_logprobs": 4, "logprobs_mode": LogprobsMode.PROCESSED, "top_k": 7},
        {"top_k": 3},
        {"top_logprobs": 0, "logit_bias": ((9, 5.0),)},
        {"top_logprobs": 20, "repetition_penalty": 2.0},
        {"top_logprobs": 1, "logprobs_mode": LogprobsMode.PROCESSED, "temperature": 0, "presence_penalty": 1.0},
        {"top_logprobs": 2, "top_p": 0.5},
    ]
    prompts = prompts_of(LENGTHS)[: len(features)]
    params = [SamplingParams(max_tokens=8, seed=i, **feature) for i, feature in enumerate(features)]
    for prompt, p, events in zip(prompts, params, run(engine_of(model_dir, device), prompts, params), strict=True):
        outputs = [event for event in events if isinstance(event, TokenOutput)]
        tokens = [event.token_id for event in outputs]
        logits = oracle.logits(prompt + tokens)[len(prompt) - 1 :]
        for i, event in enumerate(outputs):
            if p.top_logprobs is None:
                assert event.logprob is None
                continue
            raw = p.logprobs_mode is LogprobsMode.RAW
            seen = logits[i] if raw else oracle.processed(logits[i], prompt, tokens[:i], p)[0]
            assert event.logprob is not None
            check_record(event.logprob, event.token_id, seen, p.top_logprobs)


def test_no_logprobs_unless_asked_for(model_dir: Path, device: str) -> None:
    prompts = prompts_of([5, 6])
    events = run(
        engine_of(model_dir, device),
        prompts,
        [SamplingParams(max_tokens=4, seed=1), SamplingParams(max_tokens=4, seed=1, top_logprobs=0)],
    )
    assert [event.logprob for event in events[0] if isinstance(event, TokenOutput)] == [None] * 4
    records = [event.logprob for event in events[1] if isinstance(event, TokenOutput)]
    assert all(record is not None and record.top == () for record in records)
    assert not [event for some in events for event in some if isinstance(event, PromptLogprobs)]


def test_logprobs_change_no_token(model_dir: Path, device: str) -> None:
    prompts = prompts_of(LENGTHS)
    plain = [SamplingParams(seed=i, max_tokens=10) for i in range(len(prompts))]
    asked = [SamplingParams(seed=i, max_tokens=10, top_logprobs=5, prompt_logprobs=5) for i in range(len(prompts))]
    tokens = [
        [[event.token_id for event in some if isinstance(event, TokenOutput)] for some in run(engine, prompts, params)]
        for engine, params in ((engine_of(model_dir, device), plain), (engine_of(model_dir, device), asked))
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [4, 7, 16, 33, 2048])
def test_prompt_logprobs_for_every_chunk_size(
    model_dir: Path, oracle: Oracle, device: str, budget: int, depth: int
) -> None:
    engine = engine_of(model_dir, device, max_num_batched_tokens=budget, max_num_seqs=4, pipeline_depth=depth)
    prompts = prompts_of(LENGTHS)
    tops = [0, 1, 20, 3, 5, 2, 0]
    params = [SamplingParams(seed=1, max_tokens=3, prompt_logprobs=top, n=1 + i % 3) for i, top in enumerate(tops)]
    for prompt, top, events in zip(prompts, tops, run(engine, prompts, params), strict=True):
        check_prompt(events, prompt, top, oracle)
        assert isinstance(events[-1], RequestDone)
        assert events[-1].error is None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_are_not_repeated_after_preemption(
    model_dir: Path, oracle: Oracle, device: str, budget: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small chunks some are preempted in the middle of their prompt, with a part of the records sent."""
    options: dict[str, Any] = {"num_gpu_blocks": 22, "block_size": 8, "max_num_seqs": 8}
    engine = engine_of(model_dir, device, max_num_batched_tokens=budget, pipeline_depth=depth, **options)
    preempt, sent = engine._scheduler._preempt, []

    def spy(output: Output) -> None:
        sent.append(output.request.prompt_logprobs_sent / len(output.request.prompt))
        preempt(output)

    monkeypatch.setattr(engine._scheduler, "_preempt", spy)
    prompts = prompts_of([10, 12, 14, 100, 20, 30, 40])
    params = [SamplingParams(seed=1, max_tokens=40, prompt_logprobs=1, ignore_eos=True)] * len(prompts)
    events = run(engine, prompts, params)
    assert len(sent) > 2, "the pool was not tight enough to preempt"
    assert budget == 64 or any(0 < share < 1 for share in sent), "none was preempted in its prompt"
    for prompt, some in zip(prompts, events, strict=True):
        check_prompt(some, prompt, 1, oracle)


def test_prompt_logits_are_made_in_pieces(
    model_dir: Path, oracle: Oracle, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt longer than the rows of logits made at once gives the same records."""
    monkeypatch.setattr("engine.sampler.PROMPT_LOGITS_ROWS", 7)
    for prompt in prompts_of([7, 8, 9, 50]):
        events = run(engine_of(model_dir, device), [prompt], [SamplingParams(max_tokens=1, prompt_logprobs=2)])
        check_prompt(events[0], prompt, 2, oracle)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [4, 2048])
def test_max_tokens_zero_scores_the_prompt(model_dir: Path, oracle: Oracle, device: str, budget: int, n: int) -> None:
    engine = engine_of(model_dir, device, max_num_batched_tokens=budget, max_num_seqs=4)
    prompts = prompts_of(LENGTHS)
    params = [SamplingParams(max_tokens=0, prompt_logprobs=2, n=n)] * len(prompts)
    for prompt, events in zip(prompts, run(engine, prompts, params), strict=True):
        check_prompt(events, prompt, 2, oracle)
        assert not [event for event in events if isinstance(event, TokenOutput)]
        ends = [event for event in events if isinstance(event, OutputFinished)]
        assert [(end.output_index, end.reason, end.token_count) for end in ends] == [
            (index, FinishReason.LENGTH, 0) for index in range(n)
        ]
        assert isinstance(events[-1], RequestDone)
        assert events[-1].error is None
        assert events[-1].usage.completion_tokens == (0,) * n
    assert engine.load().kv_blocks_used == 0


def test_nan_in_prompt_logprobs_fails_the_request_once(model_dir: Path, device: str) -> None:
    engine = engine_of(model_dir, device, max_num_batched_tokens=8, max_num_seqs=8)
    with torch.inference_mode():
        engine._runner._model.weights.embedding_VH[300] = float("nan")
    events = run(engine, [[5] * 20 + [300] + [6] * 20], [SamplingParams(max_tokens=4, prompt_logprobs=0)])[0]
    assert [type(event) for event in events] == [Started, PromptLogprobs, PromptLogprobs, RequestDone]
    assert isinstance(events[-1], RequestDone)
    assert events[-1].error is FailReason.NAN_LOGITS
    assert engine.load().kv_blocks_used == 0
