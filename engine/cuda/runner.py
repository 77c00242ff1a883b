"""The runner of a GPU: decode rows as graphs, prompt chunks after them in the same stream, nothing waits for the host.

A step is one or two launches: the decode graph with its sampling, then the chunks. Tokens go to the device slots, where
the next step finds them, and to pinned memory, where the host reads them when it waits for the step.
"""

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.cuda.decode import ALL_STAGES, PLAIN, Decode, launched_stages
from engine.cuda.prefill import GRAPH_TOKENS, Prefill, PrefillInputs
from engine.cuda.rows import DeviceRows
from engine.lifecycle import StepResult
from engine.model.decode_chain import DecodeBuffers, DecodeChain
from engine.model.rope import cos_sin_table
from engine.model.transformer import Transformer
from engine.outputs import TokenLogprob
from engine.plan import PlanRow, Sample, StepPlan
from engine.runner import allocate_kv
from engine.sampler import LogprobTensors, Sampled, Sampler, pieces, sampled_logprobs, score
from engine.sampling_params import MAX_LOGPROBS
from engine.sampling_state import SamplingState, upload
from kernels import ops
from kernels.ops import SamplingOut, SamplingStages

# Pinned buffers that results arrive in: a step in flight, one being read, and one to spare.
RESULT_BUFFERS = 3


class CudaStep:
    """A launched step. `wait` blocks until its tokens are on the host."""

    def __init__(
        self,
        results: "_Results",
        parts: list[tuple[list[Sample], Sampled, int]],
        prompts: dict[int, "_PromptLogprobs"],
    ) -> None:
        self._parts, self._prompts = parts, prompts
        self._results = results
        # Also where nothing was sampled: waiting for a step keeps the host from running far ahead of the device.
        self._number = results.fetch()

    def wait(self) -> StepResult:
        tokens_R, best_R = self._results.read(self._number)
        tokens: list[int] = []
        is_nan: list[bool] = []
        logprobs: list[TokenLogprob | None] = []
        for samples, sampled, first in self._parts:
            rows = slice(first, first + len(samples))
            tokens += tokens_R[rows].tolist()
            is_nan += np.isnan(best_R[rows]).tolist()
            logprobs += sampled_logprobs(sampled, samples) if sampled.logprobs else [None] * len(samples)
        prompt = {number: wanted.records() for number, wanted in self._prompts.items()}
        return StepResult(tokens, is_nan, logprobs, prompt)


class CudaRunner:
    """Owns the model, the paged KV cache [L, 2, blocks, block_size, K, D], rows, graphs and the slots' state.

    Where the model lies on a CPU it runs eagerly, for tests.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        max_batched_tokens: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        config, embedding = model.config, model.weights.embedding_VH
        self._model, self._device = model, embedding.device
        self._max_batched_tokens, self._block_size = max_batched_tokens, block_size
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.kv_cache = allocate_kv(shape, embedding.dtype, self._device)
        self._state = SamplingState(num_slots, config.vocab_size, eos_token_ids, self._device)
        self._sampler = Sampler(self._state)
        cos_sin_PD = cos_sin_table(config, max_model_len).to(self._device)
        max_blocks = -(-max_model_len // block_size)
        self._rows = DeviceRows(num_slots, max_blocks, block_size, self._state.last_token_S, self._device)
        buffers = DecodeBuffers(model, num_slots)
        chain = DecodeChain(model, self.kv_cache, self._rows.tensors, cos_sin_PD, buffers)
        self._results = _Results(num_slots, self._device)
        self._decode = Decode(
            chain, buffers, self._rows.tensors, self._state.tensors, self._results.decode_out, num_slots
        )
        self._prefill = Prefill(model, self.kv_cache, self._rows.tensors, cos_sin_PD)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if self._stream is not None:  # which must see what was just written
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    # -- start and end ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self, eager: bool = False) -> None:
        """After the captures (``eager``: there are none): compile every kernel that is not captured, and take the
        memory of the largest step, which torch then keeps: the largest chunk, prompt logprobs, a full batch's logprobs.
        """
        with self._on_stream():
            for tokens in self._prefill.warm_up_tokens(self._max_batched_tokens):
                shape = self._prefill.eager_shape(tokens)
                inputs = PrefillInputs.of(self._prefill.padding(shape), shape)
                hidden_TH, logits_BV = self._prefill.forward(inputs)
                prompt_TH = hidden_TH[next(pieces(len(hidden_TH)))]
                score(self._model.logits(prompt_TH), inputs.token_ids_T[: len(prompt_TH)], MAX_LOGPROBS)
            score(logits_BV.clone(), inputs.sample_sequences_R, MAX_LOGPROBS)
            for stages in ALL_STAGES:
                self._sample_chunks(logits_BV[:1].clone(), inputs, stages, 1)
            self._decode.warm_up(eager)
        if self._stream is not None:
            self._stream.synchronize()

    @torch.inference_mode()
    def capture(self, show_progress: bool, decode: list[int] | None = None, prefill: list[int] | None = None) -> None:
        """Capture the graphs, largest first, in one memory pool. ``decode`` and ``prefill``: of these buckets only."""
        assert self._stream is not None, "graphs are for a GPU"
        pool = torch.cuda.graph_pool_handle()
        buckets = [("decode", size) for size in sorted(decode or self._decode.buckets, reverse=True)]
        if prefill is None:
            prefill = [tokens for tokens in GRAPH_TOKENS if tokens <= self._max_batched_tokens]
        buckets += [("prefill", tokens) for tokens in sorted(prefill, reverse=True)]
        with (
            self._on_stream(),
            tqdm(buckets, desc="capturing graphs", unit="bucket", disable=not show_progress) as bar,
        ):
            for kind, size in bar:
                (self._decode if kind == "decode" else self._prefill).capture(size, pool, self._stream)
        self._stream.synchronize()

    @property
    def num_graphs(self) -> int:
        return self._decode.num_graphs + self._prefill.num_graphs

    @property
    def decode_buckets(self) -> list[int]:
        return self._decode.buckets

    def close(self) -> None:
        """Graphs go before the memory they use."""
        if self._stream is not None:
            self._stream.synchronize()
        self._decode.close()
        self._prefill.close()

    # -- steps --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> CudaStep:
        """Start a step: slot states, block copies, what changed of the rows, decode, chunks; in this order."""
        with self._on_stream():
            self._state.admit_all(plan.admitted)
            if plan.copies:
                self._copy_blocks(plan.copies)
            decode, chunks = plan.decode, plan.chunks
            bucket = self._decode.bucket(len(decode)) if decode else 0
            self._rows.place(decode, bucket, chunks)
            self._rows.send()
            parts = [self._launch_decode(decode, bucket)] if decode else []
            prompts: dict[int, _PromptLogprobs] = {}
            if chunks:
                part, prompts = self._launch_chunks(chunks, len(decode))
                parts += [part] if part else []
            return CudaStep(self._results, parts, prompts)

    def _launch_decode(self, rows: list[PlanRow], bucket: int) -> tuple[list[Sample], Sampled, int]:
        samples = [row.samples[0] for row in rows]
        asked, logits_BV = self._sampler.survey(samples), self._decode.logits(bucket)
        if launched_stages(asked.stages) == PLAIN:
            self._decode.plain_step(bucket)
            asked = self._sampler.keep_raw(asked, logits_BV)
        else:
            self._decode.forward(bucket)
            asked = self._sampler.keep_raw(asked, logits_BV)
            self._decode.sample(bucket, asked.stages)
        return samples, self._sampler.answer(asked, logits_BV, self._decode.out), 0

    def _launch_chunks(
        self, rows: list[PlanRow], first_row: int
    ) -> tuple[tuple[list[Sample], Sampled, int] | None, dict[int, "_PromptLogprobs"]]:
        samples = [sample for row in rows for sample in row.samples]
        hidden_TH, logits_BV, inputs = self._prefill.run(rows, samples)
        part = None
        if samples:
            logits_RV = logits_BV.index_select(0, inputs.sample_sequences_R[: len(samples)])
            asked = self._sampler.ask(logits_RV, samples)
            out = self._sample_chunks(logits_RV, inputs, asked.stages, len(samples))
            part = samples, self._sampler.answer(asked, logits_RV, out), self._results.num_slots
        prompts, start = {}, 0
        for number, row in enumerate(rows):
            if row.prompt_logprobs is not None:
                prompts[first_row + number] = self._prompt_logprobs(row, hidden_TH, start)
            start += row.count
        return part, prompts

    def _sample_chunks(
        self, logits_RV: Tensor, inputs: PrefillInputs, stages: SamplingStages, count: int
    ) -> SamplingOut:
        out = self._results.chunk_out(count)
        slots_R, positions_R = inputs.sample_slots_R[:count], inputs.sample_positions_R[:count]
        ops.sample(logits_RV, slots_R, positions_R, self._state.tensors, launched_stages(stages), out)
        return out

    def _prompt_logprobs(self, row: PlanRow, hidden_TH: Tensor, flat_start: int) -> "_PromptLogprobs":
        """Position p is predicted by the token at p - 1; position 0 by nothing."""
        assert row.prompt_logprobs is not None
        first, number = row.prompt_logprobs
        request = row.output.request
        predicted = range(max(first, 1), first + number)
        flat_start += predicted.start - 1 - row.start
        (ids,) = upload([np.array(request.prompt[predicted.start : predicted.stop], dtype=np.int64)], self._device)
        top = request.params.prompt_logprobs or 0
        parts = []
        its_hidden = hidden_TH[flat_start : flat_start + len(ids)]
        for piece in pieces(len(ids)):
            parts.append(score(self._model.logits(its_hidden[piece]), ids[piece], top))
        opening = [TokenLogprob(request.prompt[0], None, None)] if first == 0 else []
        return _PromptLogprobs(opening, parts, top)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, destinations = np.array(copies, dtype=np.int64).T
        ops.copy_blocks(self.kv_cache, *upload([sources, destinations], self._device))

    def _on_stream(self) -> "torch.cuda.StreamContext":
        """All launches go to one stream of ours; where there is none, the CPU's."""
        return torch.cuda.stream(self._stream)


class _PromptLogprobs:
    """Logprobs of prompt positions, on their way to the host."""

    def __init__(self, opening: list[TokenLogprob], parts: list[LogprobTensors], top: int) -> None:
        self._opening, self._parts, self._top = opening, parts, top

    def records(self) -> tuple[TokenLogprob, ...]:
        """Not before the step is over."""
        records = list(self._opening)
        for part in self._parts:
            records += part.records([self._top] * len(part.token_ids_R))
        return tuple(records)


class _Results:
    """Where sampled tokens lie on the device (decode rows, then chunks), and the pinned ring they are copied to."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._raw = torch.zeros(2 * num_slots * 12, dtype=torch.uint8, device=device)
        on_cuda = device.type == "cuda"
        self._hosts = [
            torch.zeros(self._raw.shape, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(RESULT_BUFFERS)
        ]
        self._events = [torch.cuda.Event() if on_cuda else None for _ in range(RESULT_BUFFERS)]
        self._fetched = 0
        tokens, best = self._split(self._raw)
        self.decode_out = SamplingOut(tokens[:num_slots], best[:num_slots])
        self._chunk_tokens, self._chunk_best = tokens[num_slots:], best[num_slots:]

    def chunk_out(self, count: int) -> SamplingOut:
        return SamplingOut(self._chunk_tokens[:count], self._chunk_best[:count])

    def fetch(self) -> int:
        """Start the copy to the host, behind all that was launched. Returns which buffer it goes to."""
        number = self._fetched % RESULT_BUFFERS
        self._fetched += 1
        self._hosts[number].copy_(self._raw, non_blocking=True)
        if (event := self._events[number]) is not None:
            event.record()
        return number

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (int64) and best scores (float32) of a step, once it is over."""
        if (event := self._events[number]) is not None:
            event.synchronize()
        tokens, best = self._split(self._hosts[number])
        return tokens.numpy(), best.numpy()

    def _split(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        tokens, best = raw.split([2 * self.num_slots * 8, 2 * self.num_slots * 4])
        return tokens.view(torch.int64), best.view(torch.float32)
