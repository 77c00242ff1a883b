"""A request with bad fields is refused, every bad field at once."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.sampling_params import LogprobsMode, SamplingParams
from tests.engine.models import make_model

VOCAB = 512
INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: str) -> Engine:
    directory = make_model(tmp_path_factory.mktemp("model"), "llama", hidden_size=32, head_dim=16)
    return Engine(EngineConfig(model=str(directory), device=device, num_gpu_blocks=64))


BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, NAN, INFINITY],
    "top_p": [0.0, 1.1, NAN, -INFINITY],
    "top_k": [-1],
    "min_p": [-0.1, 1.1, NAN, INFINITY],
    "frequency_penalty": [-2.1, 2.1, NAN, INFINITY],
    "presence_penalty": [-2.1, 2.1, NAN, INFINITY],
    "repetition_penalty": [0.0, -1.0, 10.1, NAN, INFINITY],
    "seed": [-1, 2**64],
    "n": [0, 17],
    "logit_bias": [((5, 100.1),), ((5, NAN),), ((5, INFINITY),), ((VOCAB, 1.0),), ((-1, 1.0),), ((5, 0.0),) * 1025],
    "max_tokens": [-1],
    "min_tokens": [-1],
    "stop_token_ids": [(VOCAB,), (-1,), (5,) * 65],
    "top_logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_a_bad_field_is_refused_by_name(engine: Engine, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine.add("a", [5], SamplingParams(**{field: value}))
    assert [name for name, _ in refused.value.violations] == [field]
    assert not engine.has_work()


def test_all_bad_fields_are_listed_at_once(engine: Engine) -> None:
    params = SamplingParams(**{field: values[-1] for field, values in BAD.items()})
    with pytest.raises(InvalidRequest) as refused:
        engine.add("a", [5, VOCAB], params)
    assert {name for name, _ in refused.value.violations} == {*BAD, "prompt_token_ids"}
    assert all(reason for _, reason in refused.value.violations)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "top_p": 1e-300, "min_p": 1.0, "frequency_penalty": 2.0, "presence_penalty": -2.0},
        {"temperature": 2.0, "repetition_penalty": 10.0, "seed": 2**64 - 1, "n": 16},
        {"logit_bias": tuple((i % VOCAB, 100.0 * (-1) ** i) for i in range(1024)), "stop_token_ids": (5,) * 64},
        {"top_logprobs": 20, "prompt_logprobs": 20, "min_tokens": 3, "max_tokens": 3, "top_k": 2**32 - 1},
    ],
    ids=["low", "high", "many", "counts"],
)
def test_the_ends_of_every_range_are_served(engine: Engine, fields: dict[str, Any]) -> None:
    result = engine.generate([[5, 6]], SamplingParams(**({"max_tokens": 3, "ignore_eos": True} | fields)))[0]
    assert result.error is None
    assert len(result.outputs) == fields.get("n", 1)
    assert all(0 < len(output.token_ids) <= 3 for output in result.outputs)


def test_fields_that_do_not_go_together(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"^min_tokens: 4 is above max_tokens 3$"):
        engine.add("a", [5], SamplingParams(min_tokens=4, max_tokens=3))
    with pytest.raises(InvalidRequest, match=r"^logprobs_mode: PROCESSED"):
        engine.add("a", [5], SamplingParams(prompt_logprobs=1, logprobs_mode=LogprobsMode.PROCESSED))
