"""What steps cost is learned from noisy ones; chunks get as long as a bound allows: as numbers, and in an engine."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine.engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.lifecycle import StepResult
from engine.outputs import TokenOutput
from engine.plan import StepPlan
from engine.sampling_params import SamplingParams
from engine.step_cost import MIN_CHUNK_TOKENS, StepCost
from tests.engine.models import make_model

# A GPU's figures, in seconds: a decode step, a second read of the weights, a token of a prompt.
DECODE, FIXED, PER_TOKEN = 1.3e-3, 0.66e-3, 4.2e-6


def seconds(num_decode: int, chunk_tokens: int, per_token: float = PER_TOKEN) -> float:
    return (DECODE if num_decode else 0.0) + (FIXED + per_token * chunk_tokens if chunk_tokens else 0.0)


def learned(sizes: list[int]) -> StepCost:
    cost = StepCost()
    for size in sizes:
        cost.observe(8, 0, seconds(8, 0))
        cost.observe(8, size, seconds(8, size))
    return cost


def test_the_parts_are_told_apart_from_whole_steps() -> None:
    cost = learned([64, 256, 512, 128])
    assert cost.decode_seconds(8) == pytest.approx(DECODE)
    assert cost.fixed == pytest.approx(FIXED)
    assert cost.per_token == pytest.approx(PER_TOKEN)


def test_chunks_fill_what_the_bound_leaves_but_for_some_headroom() -> None:
    tokens = learned([64, 256, 1024, 512]).chunk_tokens(8, 6e-3)
    assert tokens % MIN_CHUNK_TOKENS == 0
    assert 0.85 * 6e-3 < seconds(8, tokens) <= 0.9 * 6e-3


def test_without_decode_rows_their_time_is_left_for_chunks() -> None:
    cost = learned([64, 256, 1024, 512])
    assert cost.chunk_tokens(0, 6e-3) - cost.chunk_tokens(8, 6e-3) == pytest.approx(DECODE / PER_TOKEN, abs=16)


@pytest.mark.parametrize("bound", [1e-6, DECODE])
def test_prompts_move_on_however_small_the_bound(bound: float) -> None:
    assert learned([64, 256, 512]).chunk_tokens(8, bound) == MIN_CHUNK_TOKENS


def test_chunks_grow_by_steps_that_were_seen() -> None:
    cost, sizes = StepCost(), []
    for _ in range(5):
        size = cost.chunk_tokens(8, 1.0)
        sizes.append(size)
        cost.observe(8, size, seconds(8, size))
    assert sizes == [64, 256, 1024, 4096, 16_384]


def test_chunks_of_one_length_leave_the_fixed_part_as_it_was() -> None:
    assert learned([64, 256, 512, 128] + [512] * 40).fixed == pytest.approx(FIXED)


def test_what_gets_dearer_is_followed_at_the_length_in_use() -> None:
    cost = learned([64, 256, 512, 128])
    for _ in range(20):
        cost.observe(8, 512, seconds(8, 512, per_token=2 * PER_TOKEN))
    assert cost.fixed + 512 * cost.per_token == pytest.approx(seconds(0, 512, per_token=2 * PER_TOKEN))


def test_decode_steps_count_by_the_size_of_the_batch() -> None:
    cost = StepCost()
    for rows, cost_of_rows in ((1, 1e-3), (16, 2e-3), (200, 3e-3)):
        cost.observe(rows, 0, cost_of_rows)
    assert [cost.decode_seconds(rows) for rows in (0, 1, 2, 20, 64, 1000)] == [0, 1e-3, 1e-3, 2e-3, 3e-3, 3e-3]


def test_a_disturbed_step_counts_for_nothing() -> None:
    cost = learned([64, 256, 512, 128, 64, 512])
    before = cost.chunk_tokens(8, 6e-3)
    cost.observe(8, 0, 0.3)
    cost.observe(8, 512, 0.3)
    assert cost.chunk_tokens(8, 6e-3) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("bound", [3e-3, 5e-3, 10e-3])
@pytest.mark.parametrize("seed", range(4))
def test_noisy_steps_stay_within_the_bound_and_use_it(bound: float, seed: int) -> None:
    """5 % noise, 1 step in 50 held up by 100 ms, a tenth of the chunks short, tokens that get dearer by and by."""
    rng, cost, taken = random.Random(seed), StepCost(), []
    for number in range(300):
        chunk = 0 if number % 3 == 0 else cost.chunk_tokens(16, bound)
        if rng.random() < 0.1:
            chunk = rng.randint(0, chunk)
        per_token = PER_TOKEN * (1 + number / 300)
        exact = seconds(16, chunk, per_token)
        cost.observe(16, chunk, exact * rng.gauss(1, 0.05) + 0.1 * (rng.random() < 0.02))
        if chunk and number >= 30:
            taken.append(exact)
    taken.sort()
    assert taken[len(taken) * 95 // 100] < bound
    assert taken[len(taken) // 2] > 0.7 * bound


class Clock:
    """Time that passes only where the pretended device works."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class PretendRunner:
    """A device of known speed, as an engine's runner. ``synchronous``: a launch runs to its end, as on a CPU."""

    def __init__(self, clock: Clock, synchronous: bool) -> None:
        self._clock, self._synchronous = clock, synchronous
        self._done = 0.0

    def launch(self, plan: StepPlan) -> "PretendHandle":
        self._done = max(self._done, self._clock.now) + seconds(len(plan.decode), plan.num_chunk_tokens)
        if self._synchronous:
            self._clock.now = self._done
        return PretendHandle(self._clock, self._done, len(plan.samples))


class PretendHandle:
    def __init__(self, clock: Clock, done: float, count: int) -> None:
        self._clock, self._done, self._count = clock, done, count

    def wait(self) -> StepResult:
        self._clock.now = max(self._clock.now, self._done)
        return StepResult([7] * self._count, [False] * self._count, [None] * self._count)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    return make_model(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=8192, **sizes)


MakeEngine = Callable[..., tuple[Engine, Clock]]


@pytest.fixture
def make_engine(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """An engine over the pretended device, and its clock."""

    def make(bound: float | None, depth: int, synchronous: bool) -> tuple[Engine, Clock]:
        clock = Clock()
        monkeypatch.setattr(engine.engine, "time", SimpleNamespace(monotonic=clock.monotonic))
        made = Engine(
            EngineConfig(
                model=str(model_dir),
                max_inter_token_ms=bound,
                pipeline_depth=depth,
                max_num_batched_tokens=8192,
                prefix_cache=False,
            )
        )
        made._runner = PretendRunner(clock, synchronous)  # type: ignore[assignment]
        made._launch_is_all = synchronous
        return made, clock

    return make


def gaps_beside_prompts(made: Engine, clock: Clock) -> tuple[list[float], int]:
    """Milliseconds between the tokens of a stream beside which ten prompts arrive, and the number of prompts' steps."""
    forever = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    made.add("stream", [5] * 100, forever)
    for _ in range(20):
        made.step()
    gaps, last, steps = [], clock.now, 0
    for number in range(10):
        made.add(str(number), [5] * 3000, SamplingParams(max_tokens=1))
        while len(made.list_requests()) > 1:
            steps += 1
            if any(isinstance(event, TokenOutput) and event.request_id == "stream" for event in made.step().events):
                gaps.append(1e3 * (clock.now - last))
                last = clock.now
        made.check()
    return gaps, steps


@pytest.mark.parametrize(("depth", "synchronous"), [(1, False), (2, False), (1, True), (2, True)])
def test_a_stream_waits_no_longer_than_the_bound_while_prompts_are_computed(
    make_engine: MakeEngine, depth: int, synchronous: bool
) -> None:
    gaps, steps = gaps_beside_prompts(*make_engine(5.0, depth, synchronous))
    assert max(gaps[10:]) <= 5.0
    ideal = 30_000 * PER_TOKEN / (5e-3 - DECODE - FIXED)
    assert steps < 1.5 * ideal + 20, "prompts are slower than the bound asks for"


def test_without_a_bound_a_prompt_is_one_chunk(make_engine: MakeEngine) -> None:
    gaps, _ = gaps_beside_prompts(*make_engine(None, 2, False))
    assert max(gaps) == pytest.approx(1e3 * seconds(1, 3000))


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_that_is_none_is_refused(bound: float) -> None:
    with pytest.raises(ConfigError, match="max_inter_token_ms must be positive milliseconds"):
        EngineConfig(model="", max_inter_token_ms=bound)
