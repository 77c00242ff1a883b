"""Too many requests for too few blocks, and cancels at every phase: everything ends once, nothing leaks."""

import random
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, DuplicateRequest, ExceedsKVCapacity, InvalidRequest, Overloaded, PromptTooLong
from engine.outputs import FailReason, RequestDone, TokenOutput
from engine.sampling_params import SamplingParams
from tests.engine.models import make_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As small as a model can be: these tests are about the engine around it."""
    return make_model(
        tmp_path_factory.mktemp("model"),
        "llama",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        head_dim=16,
    )


def engine_of(model_dir: Path, device: str, **options: Any) -> Engine:
    return Engine(EngineConfig(model=str(model_dir), device=device, dtype="float32", **options))


@pytest.mark.parametrize("depth", [1, 2])
def test_forty_blocks_under_sixty_four_requests(model_dir: Path, device: str, depth: int) -> None:
    rng = random.Random(depth)
    engine = engine_of(model_dir, device, num_gpu_blocks=40, pipeline_depth=depth, max_num_batched_tokens=128)
    for i in range(64):
        prompt = rng.choices(range(512), k=rng.randint(1, 300))
        params = SamplingParams(seed=i, max_tokens=rng.randint(1, 120), n=rng.choice([1, 1, 1, 2, 3]))
        engine.add(f"r{i}", prompt, params)
    ended: dict[str, FailReason | None] = {}
    tokens: dict[str, int] = {}
    while engine.has_work():
        for event in engine.step().events:
            if isinstance(event, RequestDone):
                assert event.request_id not in ended
                ended[event.request_id] = event.error
                assert sum(event.usage.completion_tokens) == tokens.get(event.request_id, 0)
            elif isinstance(event, TokenOutput):
                tokens[event.request_id] = tokens.get(event.request_id, 0) + 1
        engine.check()
        if rng.random() < 0.05 and (live := engine.list_requests()):
            engine.cancel(rng.choice(live).request_id)
    assert len(ended) == 64
    assert FailReason.CANCELLED in ended.values()
    assert engine.load().preemptions > 0
    assert engine.load().kv_blocks_used == 0


@pytest.mark.slow
def test_ten_thousand_cancels_at_random_phases_leak_nothing(model_dir: Path, device: str) -> None:
    rng = random.Random(11)
    engine = engine_of(model_dir, device, num_gpu_blocks=40, pipeline_depth=2, max_num_batched_tokens=64)
    started = cancelled = ended = 0
    while cancelled < 10_000:
        while len(engine.list_requests()) < 24:
            params = SamplingParams(seed=started, max_tokens=rng.randint(1, 60), n=rng.choice([1, 1, 2]))
            engine.add(f"r{started}", rng.choices(range(512), k=rng.randint(1, 200)), params)
            started += 1
        for _ in range(rng.randint(0, 2)):
            ended += sum(isinstance(event, RequestDone) for event in engine.step().events)
        for summary in rng.sample(engine.list_requests(), k=rng.randint(1, 12)):
            cancelled += engine.cancel(summary.request_id)
        engine.check()
    while engine.has_work():
        ended += sum(isinstance(event, RequestDone) for event in engine.step().events)
    assert ended == started
    assert engine.load().kv_blocks_used == 0
    assert not engine.list_requests()


def test_what_cannot_ever_run_is_refused_with_both_numbers(model_dir: Path, device: str) -> None:
    engine = engine_of(model_dir, device, num_gpu_blocks=10, max_num_seqs=4)
    with pytest.raises(PromptTooLong, match=r"513.*512"):
        engine.add("a", [5] * 500, SamplingParams(max_tokens=13))
    with pytest.raises(ExceedsKVCapacity, match=r"11.*10"):
        engine.add("a", [5] * 161, SamplingParams(max_tokens=1))
    with pytest.raises(ExceedsKVCapacity):
        engine.add("a", [5] * 100, SamplingParams(max_tokens=60, n=2))
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine.add("a", [5, 512], SamplingParams())
    with pytest.raises(InvalidRequest, match="at least one token"):
        engine.add("a", [], SamplingParams())
    with pytest.raises(InvalidRequest, match="max_num_seqs"):
        engine.add("a", [5], SamplingParams(n=5))
    assert not engine.has_work()


@pytest.mark.parametrize("n", [1, 3])
def test_the_room_left_is_exactly_what_fits(model_dir: Path, device: str, n: int) -> None:
    """With max_tokens unset a request may fill the pool to the last block, alone, and ends there by LENGTH."""
    engine = engine_of(model_dir, device, num_gpu_blocks=12, block_size=8)
    result = engine.generate([[5] * 21], SamplingParams(n=n, ignore_eos=True, seed=1))[0]
    blocks_each = 12 if n == 1 else 2 + (12 - 2) // 3
    assert [len(output.token_ids) for output in result.outputs] == [blocks_each * 8 - 21 + 1] * n
    assert result.usage is not None
    assert result.usage.preemptions == 0
    engine.check()


def test_the_queue_is_bounded_and_ids_are_unique_while_alive(model_dir: Path, device: str) -> None:
    engine = engine_of(model_dir, device, num_gpu_blocks=40, max_queued_requests=2, max_queued_tokens=50)
    engine.add("a", [5] * 10, SamplingParams(max_tokens=1))
    with pytest.raises(DuplicateRequest, match="'a'"):
        engine.add("a", [5], SamplingParams(max_tokens=1))
    with pytest.raises(Overloaded, match="50 prompt tokens"):
        engine.add("b", [5] * 41, SamplingParams(max_tokens=1))
    engine.add("b", [5] * 40, SamplingParams(max_tokens=1))
    with pytest.raises(Overloaded, match="2 requests"):
        engine.add("c", [5], SamplingParams(max_tokens=1))
    while engine.has_work():
        engine.step()
    engine.add("a", [5], SamplingParams(max_tokens=1))


def test_more_prompts_than_the_queue_holds_run_through_generate(model_dir: Path, device: str) -> None:
    engine = engine_of(model_dir, device, num_gpu_blocks=40, max_queued_requests=3, max_num_seqs=2)
    results = engine.generate([[5, i] for i in range(20)], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert [len(result.token_ids) for result in results] == [3] * 20


def test_two_engines_in_one_process_do_not_meet(model_dir: Path, tiny_dir: Path, device: str) -> None:
    one = engine_of(model_dir, device, num_gpu_blocks=40)
    other = engine_of(tiny_dir, device, num_gpu_blocks=40, block_size=8, pipeline_depth=2)
    params = SamplingParams(seed=3, max_tokens=10)
    alone = [engine.generate([[5, 6, 7]], params)[0].token_ids for engine in (one, other)]
    for engine in (one, other):
        engine.add("x", [5, 6, 7], params)
    tokens: list[list[int]] = [[], []]
    while one.has_work() or other.has_work():
        for i, engine in enumerate((one, other)):
            tokens[i] += [event.token_id for event in engine.step().events if isinstance(event, TokenOutput)]
    assert tokens == alone


@pytest.mark.parametrize("blocks", [10**12, 10**30])
def test_a_pool_that_memory_cannot_hold_is_one_line_with_what_to_lower(
    model_dir: Path, device: str, blocks: int
) -> None:
    with pytest.raises(ConfigError, match=r"GiB on .*lower num_gpu_blocks") as caught:
        engine_of(model_dir, device, num_gpu_blocks=blocks)
    assert "\n" not in str(caught.value)
