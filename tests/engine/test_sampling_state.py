"""The sampling state of slots: written together or alone, and without waiting for a GPU."""

import dataclasses

import pytest
import torch

from engine.plan import Sample
from engine.request import Output, Request
from engine.sampler import Sampler, sampled_logprobs, score
from engine.sampling_params import LogprobsMode, SamplingParams
from engine.sampling_state import SamplingState
from tests.engine.test_sampling import EOS, FEATURES, VOCAB, feature_params, prompts_of

pytestmark = pytest.mark.usefixtures("one_thread")


def outputs_of(params: list[SamplingParams]) -> list[Output]:
    """Seated, with some tokens generated already."""
    outputs = []
    for i, (prompt, p) in enumerate(zip(prompts_of(len(params), seed=5), params, strict=True)):
        output = Request(str(i), prompt, p, seed=p.seed or 0, max_tokens=16, number=i, arrival=0.0).outputs[-1]
        output.slot, output.token_ids = (7 * i) % len(params), prompts_of(1, seed=i)[0][: i % 4]
        outputs.append(output)
    return outputs


def test_outputs_admitted_together_equal_outputs_admitted_alone(device: str) -> None:
    params = feature_params(1)[:-1]
    together, alone = (SamplingState(len(params), VOCAB, (EOS,), torch.device(device)) for _ in range(2))
    together.admit_all(outputs_of(params[::-1]))  # whose slots are taken over
    together.admit_all(outputs_of(params))
    for output in [*outputs_of(params[::-1]), *outputs_of(params)]:
        alone.admit(output)
    for field in dataclasses.fields(together.tensors):
        assert torch.equal(getattr(together.tensors, field.name), getattr(alone.tensors, field.name)), field.name


def test_a_launch_waits_for_nothing(device: str) -> None:
    """Admission, the draw and logprobs of both kinds."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    features = [*FEATURES.values()]
    params = [
        SamplingParams(**feature, top_logprobs=i % 5, logprobs_mode=[*LogprobsMode][i % 2])
        for i, feature in enumerate(features)
    ]
    outputs = outputs_of(params)
    state = SamplingState(len(params), VOCAB, (EOS,), torch.device(device))
    samples = [Sample(output, 0, output.slot, output.num_tokens, i % 2 == 0) for i, output in enumerate(outputs)]
    logits = torch.randn(len(params), VOCAB, device=device)
    with torch.inference_mode():
        for mode in ("default", "error"):  # kernels are loaded in the first round
            torch.cuda.set_sync_debug_mode(mode)
            try:
                state.admit_all(outputs)
                sampled = Sampler(state).sample(logits.clone(), samples)
                score(logits, sampled.tokens_R, 3)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    assert None not in sampled_logprobs(sampled, samples)
