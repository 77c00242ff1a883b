"""Sampling through the engine against a slow oracle: draws, penalties, stops, seeds, refusals."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import FailReason, FinishReason, OutputFinished, RequestDone
from engine.plan import StepPlan
from engine.results import GenerationResult, collect_results
from engine.sampling_params import SamplingParams
from kernels.reference.sampling import sub_seed
from tests.engine.equality import check_equal_by_rule
from tests.engine.models import make_model
from tests.engine.sampling_oracle import Oracle, check_stopped

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 1
VOCAB = 512
NAN = float("nan")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Oracle:
    return Oracle(model_dir, EOS)


def engine_of(model_dir: Path, device: str, **options: Any) -> Engine:
    settings: dict[str, Any] = {"num_gpu_blocks": 512, "dtype": "float32", "max_num_seqs": 80}
    return Engine(EngineConfig(model=str(model_dir), device=device, **(settings | options)))


@pytest.fixture(scope="module")
def engine(model_dir: Path, device: str) -> Engine:
    return engine_of(model_dir, device)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(2, VOCAB), k=rng.choice([1, 2, 15, 16, 17, 40])) for _ in range(count)]


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[GenerationResult]:
    results = engine.generate(prompts, params)
    assert [result.error for result in results] == [None] * len(prompts)
    engine.check()
    return results


# Some tokens favoured, so that penalties and filters meet repetition.
FAVOURED = tuple((token, 4.0) for token in range(20, 40))
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.0},
    "greedy": {"temperature": 0},
    "greedy ignores filters": {"temperature": 0, "top_k": 3, "top_p": 0.1, "min_p": 0.9},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k above the vocabulary": {"top_k": 10_000},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "all filters": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
    "repetition": {"repetition_penalty": 1.8, "logit_bias": FAVOURED},
    "repetition below 1": {"repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": 1.5, "logit_bias": FAVOURED},
    "negative frequency": {"frequency_penalty": -2.0, "temperature": 0.5},
    "presence": {"presence_penalty": 2.0, "logit_bias": FAVOURED},
    "negative presence": {"presence_penalty": -2.0},
    "greedy penalties": {
        "temperature": 0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
        "logit_bias": FAVOURED,
    },
    "bias": {"logit_bias": ((7, 6.0), (9, -100.0), (511, 3.5), (0, 2.0))},
    "a token biased twice": {"logit_bias": ((7, 3.0), (8, 4.0), (7, 3.0))},
    "n": {"n": 3, "frequency_penalty": 1.0, "top_p": 0.9, "logit_bias": FAVOURED},
    "greedy n": {"n": 2, "temperature": 0},
    "stop ids": {"stop_token_ids": tuple(range(100, 160))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(100, 164)), "logit_bias": ((EOS, 5.0),)},
    "min_tokens without EOS": {"min_tokens": 5, "ignore_eos": True, "logit_bias": ((EOS, 5.0),)},
    "everything": {
        "temperature": 0.9,
        "top_k": 100,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.2,
        "logit_bias": FAVOURED,
        "min_tokens": 4,
        "stop_token_ids": (21, 22, 23),
        "n": 2,
    },
}


def feature_params(seed: int, **common: Any) -> list[SamplingParams]:
    """Every feature twice."""
    features = [*FEATURES.values()] * 2
    return [SamplingParams(**({"seed": seed + i, "max_tokens": 16} | common | f)) for i, f in enumerate(features)]


def check_by_oracle(
    oracle: Oracle, prompts: list[list[int]], params: list[SamplingParams], results: list[GenerationResult]
) -> None:
    stopped = 0
    for i, (prompt, p, result) in enumerate(zip(prompts, params, results, strict=True)):
        try:
            stopped += oracle.check(prompt, p, result.outputs)
        except AssertionError as error:
            raise AssertionError(f"prompt {i}, {p}: {error}") from error
    check_stopped(stopped, sum(p.n for p in params))


@pytest.mark.parametrize("depth", [1, 2])
def test_every_feature_equals_the_oracle_in_one_mixed_batch(
    model_dir: Path, oracle: Oracle, device: str, depth: int
) -> None:
    """All features at once, so that a stage that is on for one row must leave the others alone."""
    params = feature_params(100 * depth)
    prompts = prompts_of(len(params), seed=depth)
    check_by_oracle(oracle, prompts, params, run(engine_of(model_dir, device, pipeline_depth=depth), prompts, params))


@pytest.mark.parametrize("depth", [1, 2])
def test_every_feature_equals_the_oracle_in_reused_slots_and_after_preemption(
    model_dir: Path, oracle: Oracle, device: str, depth: int
) -> None:
    """Nothing of a slot's last owner is left, and counts are rebuilt when an output resumes."""
    params = feature_params(7, max_tokens=40)
    prompts = prompts_of(len(params), seed=7)
    options: dict[str, Any] = {"num_gpu_blocks": 20, "block_size": 8, "max_num_seqs": 7, "pipeline_depth": depth}
    engine = engine_of(model_dir, device, **options)
    check_by_oracle(oracle, prompts, params, run(engine, prompts, params))
    assert engine.load().preemptions > 5, "the pool was not tight enough to preempt"


def test_every_feature_equals_the_oracle_alone(engine: Engine, oracle: Oracle) -> None:
    params = feature_params(3)
    prompts = prompts_of(len(params), seed=3)
    results = [run(engine, [prompt], [p])[0] for prompt, p in zip(prompts, params, strict=True)]
    check_by_oracle(oracle, prompts, params, results)


def test_temperature_zero_is_greedy_whatever_the_seed(engine: Engine) -> None:
    prompts = prompts_of(4)
    greedy = [run(engine, prompts, [SamplingParams(temperature=0, seed=s, max_tokens=12)] * 4) for s in (None, 5)]
    assert [r.token_ids for r in greedy[0]] == [r.token_ids for r in greedy[1]]


@pytest.mark.parametrize("temperature", [1e-6, 1e-35, 1e-50, 5e-324])
def test_a_temperature_near_zero_is_greedy(engine: Engine, temperature: float) -> None:
    """It is honoured, however small, though float32 could not even hold it."""
    prompts = prompts_of(4)
    greedy = run(engine, prompts, [SamplingParams(temperature=0, max_tokens=12)] * 4)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=12, top_p=0.9) for i in range(4)]
    assert [r.token_ids for r in run(engine, prompts, params)] == [r.token_ids for r in greedy]


def test_a_seeded_request_draws_the_same_alone_and_among_64_others(engine: Engine, oracle: Oracle) -> None:
    prompts, params = (
        prompts_of(70),
        [SamplingParams(**FEATURES["all filters"], seed=i, max_tokens=12) for i in range(70)],
    )
    params[3 : 3 + 2 * len(FEATURES)] = feature_params(50, max_tokens=9)
    watched = [0, 1, 2, 64, 65, 69]
    together = run(engine, prompts, params)
    alone = [run(engine, [prompts[i]], [params[i]])[0].token_ids for i in watched]
    check_equal_by_rule(
        [together[i].token_ids for i in watched],
        alone,
        lambda k, tokens: oracle.scores(prompts[watched[k]], tokens, params[watched[k]])[0],
    )
    assert len({tuple(tokens) for tokens in alone}) == len(watched)


def test_n_outputs_differ_and_each_is_a_request_with_its_sub_seed(engine: Engine, oracle: Oracle) -> None:
    prompts, seeds = prompts_of(3), [7, 2**63 + 5, 2**64 - 1]
    for prompt, seed in zip(prompts, seeds, strict=True):
        forked = run(engine, [prompt], [SamplingParams(n=4, seed=seed, max_tokens=16)])[0]
        assert forked.seed == seed
        outputs = [output.token_ids for output in forked.outputs]
        assert len({tuple(tokens) for tokens in outputs}) == 4
        singles = [SamplingParams(seed=sub_seed(seed, i), max_tokens=16) for i in range(4)]
        own = [run(engine, [prompt], [single])[0].token_ids for single in singles]
        check_equal_by_rule(outputs, own, lambda i, tokens: oracle.scores(prompt, tokens, singles[i])[0])  # noqa: B023


def test_an_unseeded_request_reports_the_seed_that_repeats_it(engine: Engine) -> None:
    prompt = prompts_of(1)[0]
    first, second = (run(engine, [prompt], [SamplingParams(max_tokens=20)])[0] for _ in range(2))
    assert first.seed is not None
    assert first.seed != second.seed
    again = run(engine, [prompt], [SamplingParams(max_tokens=20, seed=first.seed)])[0]
    assert again.token_ids == first.token_ids


def test_eos_ends_at_min_tokens_unless_ignored(engine: Engine) -> None:
    wants_eos: dict[str, Any] = {"logit_bias": ((EOS, 100.0),), "max_tokens": 8, "seed": 1}
    params = [
        SamplingParams(**wants_eos),
        SamplingParams(**wants_eos, min_tokens=5),
        SamplingParams(**wants_eos, ignore_eos=True),
        SamplingParams(**wants_eos, ignore_eos=True, stop_token_ids=(EOS,)),
    ]
    results = [result.outputs[0] for result in run(engine, prompts_of(4), params)]
    assert results[0].token_ids == [EOS]
    assert EOS not in results[1].token_ids[:5]
    assert (len(results[1].token_ids), results[1].token_ids[-1]) == (6, EOS)
    assert results[2].token_ids == [EOS] * 8
    assert results[3].token_ids == [EOS]
    reasons = [output.finish_reason for output in results]
    assert reasons == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
    assert [output.stop_token_id for output in results] == [EOS, EOS, None, EOS]


@pytest.mark.parametrize(("ignore_eos", "is_eos"), [(False, True), (True, False)])
def test_the_end_tells_eos_from_a_stop_id(engine: Engine, ignore_eos: bool, is_eos: bool) -> None:
    params = SamplingParams(logit_bias=((EOS, 100.0),), stop_token_ids=(EOS,), ignore_eos=ignore_eos, max_tokens=4)
    engine.add("a", [5], params)
    events = [event for _ in iter(engine.has_work, False) for event in engine.step().events]
    assert [e.is_eos for e in events if isinstance(e, OutputFinished)] == [is_eos]


def test_a_resumed_output_computes_its_own_tokens_even_one_at_a_time(
    model_dir: Path, oracle: Oracle, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many seats as tokens in a step: when the others decode, a resuming output gets one token, not its last."""
    rng = random.Random(1379)  # found by search: such a row, and five tokens drawn after it
    prompts = [[50 + i] * (1 + i % 4) for i in range(9)]
    params = [SamplingParams(seed=i, max_tokens=12 + i % 9, ignore_eos=True) for i in range(9)]
    options: dict[str, Any] = {"num_gpu_blocks": 6, "block_size": 8, "max_num_seqs": 5, "max_num_batched_tokens": 5}
    engine = engine_of(model_dir, device, pipeline_depth=1, **options)
    schedule, rows, events = engine._scheduler.schedule, [], []

    def spy() -> StepPlan | None:
        plan = schedule()
        rows.extend(plan.rows if plan else [])
        return plan

    monkeypatch.setattr(engine._scheduler, "schedule", spy)
    for i in range(9):
        engine.add(str(i), prompts[i], params[i], priority=rng.randint(0, 3))
        for _ in range(rng.randint(0, 9)):
            events += engine.step().events
    while engine.has_work():
        events += engine.step().events
    assert [r for r in rows if r.count == 1 and not r.samples and r.start >= len(r.output.request.prompt)]
    check_by_oracle(oracle, prompts, params, collect_results(events, 9))


# -- NaN --------------------------------------------------------------------------------------------------------


def test_nan_logits_fail_their_request_and_no_other(model_dir: Path, device: str) -> None:
    """The embedding of token 300 is NaN: whoever has it in the prompt fails, neighbours and successors do not."""
    engine = engine_of(model_dir, device, num_gpu_blocks=40)
    fine = prompts_of(3, seed=9)
    clean = [[token for token in prompt if token != 300] for prompt in fine]
    features: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_k": 5, "top_p": 0.9},
        {"n": 3},
        {"top_logprobs": 3},
        {"max_tokens": 1},
    ]
    poisoned = [SamplingParams(**({"seed": 1, "max_tokens": 5} | feature)) for feature in features]
    poisoned.append(SamplingParams(max_tokens=0, prompt_logprobs=2))
    params = [SamplingParams(seed=4, max_tokens=5, ignore_eos=True, logit_bias=((300, -100.0),))] * 3
    expected = [result.token_ids for result in run(engine, clean, params)]
    engine._runner._model.weights.embedding_VH[300] = NAN
    for _ in range(2):
        results = engine.generate([*clean, *([[5, 300, 7]] * len(poisoned))], [*params, *poisoned])
        assert [result.error for result in results] == [None] * 3 + [FailReason.NAN_LOGITS] * len(poisoned)
        assert [result.token_ids for result in results[:3]] == expected
        assert not any(output.token_ids for result in results[3:] for output in result.outputs)
        assert engine.load().kv_blocks_used == 0
        engine.check()


def test_nan_of_a_single_logit_is_noticed(
    model_dir: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model_dir, device, num_gpu_blocks=40)
    model = engine._runner._model
    logits = model.logits
    bad = torch.tensor([17], device=device)
    monkeypatch.setattr(model, "logits", lambda hidden: logits(hidden).index_fill(1, bad, NAN))
    engine.add("a", [5, 6], SamplingParams(temperature=0, max_tokens=5))
    done = [e for _ in iter(engine.has_work, False) for e in engine.step().events if isinstance(e, RequestDone)]
    assert [event.error for event in done] == [FailReason.NAN_LOGITS]
    assert "position 2" in done[0].message
