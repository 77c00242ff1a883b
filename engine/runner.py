"""The runner: weights, KV tensors and sampling of one device. Takes plans, gives tokens."""

import math

import torch
from torch import Tensor

from engine.batch import BatchBuilder, StepInputs
from engine.errors import ConfigError
from engine.lifecycle import StepResult
from engine.model.rope import cos_sin_table
from engine.model.transformer import Transformer
from engine.outputs import TokenLogprob
from engine.plan import PlanRow, StepPlan
from engine.sampler import Sampled, Sampler, logprob_records, pieces, sampled_logprobs
from engine.sampling_state import SamplingState
from kernels import ops

PromptRecords = dict[int, tuple[TokenLogprob, ...]]


class StepHandle:
    """A launched step. `wait` blocks until its tokens are on the host."""

    def __init__(self, sampled: Sampled | None, inputs: StepInputs, prompt: PromptRecords) -> None:
        self._sampled, self._inputs, self._prompt = sampled, inputs, prompt

    def wait(self) -> StepResult:
        if self._sampled is None:
            return StepResult([], [], [], self._prompt)
        return StepResult(
            tokens=self._sampled.tokens_R.tolist(),
            is_nan=self._sampled.best_R.isnan().tolist(),
            logprobs=sampled_logprobs(self._sampled, self._inputs.samples),
            prompt_logprobs=self._prompt,
        )


def allocate_kv(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The KV pool. Unwritten KV is never read, so it is not cleared. Raises `ConfigError` when memory does not do."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, OverflowError, TypeError):  # both allocators; a number beyond 64 bits
        gib = math.prod(shape) * dtype.itemsize / 2**30
        message = f"{shape[2]} KV blocks need {gib:.1f} GiB on {device}, which cannot be had; lower num_gpu_blocks"
        raise ConfigError(f"{message} or the share of memory given to them") from None


class Runner:
    """Owns the model, the paged KV cache [L, 2, blocks, block_size, K, D] and the per-slot sampling state."""

    def __init__(
        self,
        model: Transformer,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        config, embedding = model.config, model.weights.embedding_VH
        device, dtype = embedding.device, embedding.dtype
        self._model = model
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.kv_cache = allocate_kv(shape, dtype, device)
        self._state = SamplingState(num_slots, config.vocab_size, eos_token_ids, device)
        self._sampler = Sampler(self._state)
        cos_sin = cos_sin_table(config, max_model_len).to(device)
        self._builder = BatchBuilder(self._state, cos_sin, dtype, block_size)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step: slot states, block copies, forward, sampling, in this order."""
        self._state.admit_all(plan.admitted)
        if plan.copies:
            self._copy_blocks(plan.copies)
        inputs = self._builder.build(plan)
        hidden_TH = self._model.hidden_states(inputs.forward, self.kv_cache)
        prompt = {
            number: self._prompt_records(plan.rows[number], hidden_TH, flat_rows, token_ids)
            for number, (flat_rows, token_ids) in inputs.prompt_rows.items()
        }
        sampled = None
        if inputs.samples:
            logits_RV = self._model.logits(hidden_TH.index_select(0, inputs.sample_rows))
            sampled = self._sampler.sample(logits_RV, inputs.samples)
        return StepHandle(sampled, inputs, prompt)

    def close(self) -> None:
        """Nothing to end; memory goes with the object."""

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, destinations = torch.tensor(copies, device=self.kv_cache.device).unbind(1)
        ops.copy_blocks(self.kv_cache, sources, destinations)

    def _prompt_records(
        self, row: PlanRow, hidden_TH: Tensor, flat_rows: Tensor, token_ids: Tensor
    ) -> tuple[TokenLogprob, ...]:
        assert row.prompt_logprobs is not None
        request = row.output.request
        top = request.params.prompt_logprobs or 0
        records = [TokenLogprob(request.prompt[0], None, None)] if row.prompt_logprobs[0] == 0 else []
        for piece in pieces(len(token_ids)):
            logits_RV = self._model.logits(hidden_TH.index_select(0, flat_rows[piece]))
            records += logprob_records(logits_RV, token_ids[piece], top)
        return tuple(records)
