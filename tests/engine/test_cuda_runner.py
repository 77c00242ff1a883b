"""The GPU's runner against the plain one, request by request. On a CPU its kernels run in Triton's interpreter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from engine.config import EngineConfig
from engine.cuda.runner import CudaRunner
from engine.engine import Engine
from engine.model.transformer import Transformer
from engine.results import GenerationResult
from engine.sampling_params import LogprobsMode, SamplingParams
from tests.engine.equality import check_equal_by_rule
from tests.engine.models import make_model
from tests.engine.test_equality import Reference

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("model"),
        "qwen2",
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        vocab_size=128,
        head_dim=16,
    )


def plain_engine(model_dir: Path, device: str, **options: Any) -> Engine:
    settings: dict[str, Any] = {"num_gpu_blocks": 128, "dtype": "float32", "pipeline_depth": 1, "kernels": "reference"}
    return Engine(EngineConfig(model=str(model_dir), device=device, **(settings | options)))


def cuda_engine(model_dir: Path, device: str, **options: Any) -> Engine:
    """On a GPU the engine as it is; on a CPU one whose runner was exchanged."""
    if device == "cuda":
        return plain_engine(model_dir, device, **({"kernels": "auto"} | options))
    engine = plain_engine(model_dir, device, **options)
    model = engine._runner._model
    limits, config = engine.info.limits, engine._config
    engine._runner = CudaRunner(
        Transformer(model.config, model.weights),
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_slots=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=engine.info.eos_token_ids,
    )
    return engine


PARAMS = [
    SamplingParams(temperature=0, max_tokens=4),
    SamplingParams(temperature=0.8, seed=5, max_tokens=3, top_logprobs=2),
    SamplingParams(temperature=0, max_tokens=4, repetition_penalty=1.5, frequency_penalty=0.3),
    SamplingParams(temperature=1.2, seed=6, max_tokens=3, top_k=5, min_p=0.01, logit_bias=((7, 5.0),)),
    SamplingParams(temperature=0, max_tokens=3, min_tokens=3, stop_token_ids=(8, 9), prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=9, max_tokens=2, n=3, top_logprobs=1, logprobs_mode=LogprobsMode.PROCESSED),
    SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2),
]


@pytest.mark.parametrize("depth", [1, 2])
def test_it_equals_the_plain_runner(model_dir: Path, device: str, depth: int) -> None:
    """Decode, whole and chunked prompts, forks, penalties, filters, logprobs; more requests than seats."""
    prompts = [[3 + (7 * i + j) % 120 for j in range(length)] for i, length in enumerate([1, 17, 16, 30, 25, 20, 9])]
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "block_size": 8}
    expected = plain_engine(model_dir, device, **sizes).generate(prompts, PARAMS)
    engine = cuda_engine(model_dir, device, pipeline_depth=depth, **sizes)
    engine._runner.kv_cache.fill_(float("nan"))
    ours = engine.generate(prompts, PARAMS)
    engine.check()
    assert engine.load().kv_blocks_used == 0
    for mine, theirs in zip(ours, expected, strict=True):
        assert [o.token_ids for o in mine.outputs] == [o.token_ids for o in theirs.outputs]
        assert [o.finish_reason for o in mine.outputs] == [o.finish_reason for o in theirs.outputs]
        check_logprobs(mine, theirs)


def check_logprobs(ours: GenerationResult, theirs: GenerationResult) -> None:
    pairs = [(ours.prompt_logprobs, theirs.prompt_logprobs)]
    pairs += [(a.logprobs, b.logprobs) for a, b in zip(ours.outputs, theirs.outputs, strict=True)]
    for mine, other in pairs:
        assert len(mine) == len(other)
        for a, b in zip(mine, other, strict=True):
            assert (a.token_id, a.rank) == (b.token_id, b.rank)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert [t.token_id for t in a.top] == [t.token_id for t in b.top]


def test_a_preempted_request_goes_on(model_dir: Path, device: str) -> None:
    prompts = [[3 + (5 * i + j) % 120 for j in range(20 + i)] for i in range(3)]
    params = [SamplingParams(temperature=0, max_tokens=6)] * 3
    roomy = plain_engine(model_dir, device).generate(prompts, params)
    tight = cuda_engine(model_dir, device, num_gpu_blocks=9, block_size=8, pipeline_depth=2)
    results = tight.generate(prompts, params)
    assert tight.load().preemptions > 0, "the pool was not tight enough to preempt"
    reference = Reference(model_dir, prompts, params)
    check_equal_by_rule([r.token_ids for r in results], [r.token_ids for r in roomy], reference)


def test_nan_logits_end_the_request_alone(model_dir: Path, device: str) -> None:
    engine = cuda_engine(model_dir, device)
    with torch.inference_mode():
        engine._runner._model.weights.embedding_VH[5] = float("nan")
    params = SamplingParams(temperature=0, max_tokens=3)
    broken, fine = engine.generate([[3, 5], [3, 4]], params)
    assert broken.error is not None
    assert fine.error is None


@pytest.mark.parametrize("eager", [False, True])
def test_nothing_is_compiled_after_the_start(tmp_path: Path, device: str, eager: bool) -> None:
    """Batches of every kind run on what the start has compiled: a request never waits for a compiler.

    The model's shape is of this test alone: what other tests compiled would hide what the start did not.
    """
    if device == "cpu":
        pytest.skip("nothing is compiled on a CPU")
    hidden, vocab = (96, 136) if eager else (80, 152)
    model_dir = make_model(
        tmp_path, "qwen2", hidden_size=hidden, intermediate_size=72, num_hidden_layers=1, vocab_size=vocab, head_dim=16
    )
    engine = cuda_engine(model_dir, device, max_num_batched_tokens=700, max_num_seqs=40, enforce_eager=eager)
    compiled: list[str] = []

    def note(*args: Any, **options: Any) -> None:
        compiled.append(options["repr"])

    knobs = triton.knobs.runtime
    before, knobs.jit_cache_hook = knobs.jit_cache_hook, note
    try:
        for number, lengths in enumerate(([1], [400, 33, 5], [7] * 9, [3] * 40, [450] * 3, [90] * 20)):
            prompts = [[3 + (number + i + j) % 120 for j in range(length)] for i, length in enumerate(lengths)]
            params = [replace(PARAMS[i % 6], n=1) for i in range(len(prompts))]
            engine.generate(prompts, params)
            plain = [SamplingParams(max_tokens=3, top_logprobs=1, logprobs_mode=mode) for mode in LogprobsMode]
            engine.generate(prompts[:2], plain[: len(prompts)])
    finally:
        knobs.jit_cache_hook = before
    assert compiled == []
