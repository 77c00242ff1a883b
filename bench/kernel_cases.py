"""The cases of `bench.kernels`: one small builder per kernel, listed in `BUILDERS`. A new kernel is one more of them.

These are the operations of `kernels.ops`; `bench.chain_cases` adds the kernels of the decode chain.

Shapes: T tokens, H hidden, N query heads, K KV heads, D head_dim, V vocabulary, B sequences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.config import ModelConfig
from kernels import ops

Call = Callable[[], object]
# All copies of what a kernel reads are together beyond the caches (50 MB of L2), and few enough to be made.
COPIES_BYTES = {"cuda": 256 * 1024**2, "cpu": 0}
LEAST_COPIES, MOST_COPIES = {"cuda": 8, "cpu": 2}, 512
MOST_BYTES = {"cuda": 40 * 1024**3, "cpu": 2 * 1024**3}
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One kernel at one size. ``calls``: the kernel on every copy of its data; ``peer``: torch's product on the same.

    ``nbytes`` are read and written at least, ``flops`` computed, by one call. ``plain``: without dependent launch what
    is with it in ``calls``.
    """

    name: str
    size: str
    calls: list[Call]
    nbytes: float
    flops: float = 0.0
    peer: list[Call] = field(default_factory=list)
    plain: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """What the builders share: the model's shape, where tensors are, and which sizes were asked for."""

    config: ModelConfig
    device: str
    dtype: torch.dtype
    tokens: list[int]
    contexts: list[int]
    prefills: list[int]

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def matrix(self, rows: int, inner: int) -> Tensor:
        return torch.randn(rows, inner, device=self.device).mul_(inner**-0.5).to(self.dtype)

    def integers(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self.device)

    def copies(self, nbytes: float) -> range:
        """How many copies of ``nbytes`` a case rotates through; none when they would not fit."""
        number = max(LEAST_COPIES[self.device], -(-COPIES_BYTES[self.device] // max(int(nbytes), 1)))
        number = min(number, MOST_COPIES)
        return range(number if number * nbytes <= MOST_BYTES[self.device] else 0)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def linear(bench: Bench) -> Iterator[Case]:
    """Every matrix of a layer, with its bias, and the head. On a GPU these are torch's products."""
    c = bench.config
    heads = c.num_heads * c.head_dim
    matrices = [
        ("qkv", heads + 2 * c.num_kv_heads * c.head_dim, c.hidden_size, c.qkv_bias),
        ("o", c.hidden_size, heads, c.o_bias),
        ("gate_up", 2 * c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("down", c.hidden_size, c.intermediate_size, c.mlp_bias),
        ("head", c.vocab_size, c.hidden_size, False),
    ]
    for name, rows, inner, has_bias in matrices:
        nbytes = float(rows * inner * bench.itemsize)
        weights = [bench.matrix(rows, inner) for _ in bench.copies(nbytes)]
        packed = [ops.pack_weight(weight) for weight in weights]
        bias = bench.random(rows) if has_bias else None
        for tokens in bench.tokens:
            if name == "head" and tokens > 256:
                continue  # logits are made for the rows that are sampled only
            x = bench.random(tokens, inner)
            yield Case(
                f"linear {name}",
                f"{tokens} x {inner} -> {rows}",
                [_product(name, x, weight, bias) for weight in packed],
                nbytes + tokens * (rows + inner) * bench.itemsize,
                2.0 * tokens * rows * inner,
                [_torch_product(x, weight, bias) for weight in weights if bench.device == "cpu"],
            )


def _product(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Call:
    return (lambda: ops.linear_float32(x, weight)) if name == "head" else (lambda: ops.linear(x, weight, bias))


def _torch_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Call:
    return lambda: F.linear(x, weight, bias)


def norms(bench: Bench) -> Iterator[Case]:
    H, eps = bench.config.hidden_size, bench.config.norm_eps
    weight = bench.random(H)
    for tokens in bench.tokens:
        row_bytes = float(tokens * H * bench.itemsize)
        pairs = [(bench.random(tokens, H), bench.random(tokens, H)) for _ in bench.copies(2 * row_bytes)]
        yield Case("rmsnorm", f"{tokens} x {H}", [_rmsnorm(x, weight, eps) for x, _ in pairs], 2 * row_bytes)
        adds = [_add_rmsnorm(x, residual, weight, eps) for x, residual in pairs]
        yield Case("add_rmsnorm", f"{tokens} x {H}", adds, 4 * row_bytes)


def _rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Call:
    return lambda: ops.rmsnorm(x, weight, eps)


def _add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Call:
    return lambda: ops.add_rmsnorm(x, residual, weight, eps)


def silu_mul(bench: Bench) -> Iterator[Case]:
    width = bench.config.intermediate_size
    for tokens in bench.tokens:
        nbytes = float(3 * tokens * width * bench.itemsize)
        inputs = [bench.random(tokens, 2 * width) for _ in bench.copies(nbytes)]
        yield Case("silu_mul", f"{tokens} x {2 * width}", [_silu_mul(x) for x in inputs], nbytes)


def _silu_mul(gate_up: Tensor) -> Call:
    return lambda: ops.silu_mul(gate_up)


def rope_and_store(bench: Bench) -> Iterator[Case]:
    c = bench.config
    heads = c.num_heads + 2 * c.num_kv_heads
    norm = None
    if c.qk_norm:
        norm = ops.HeadNorms(bench.random(c.head_dim), bench.random(c.head_dim), c.norm_eps)
    for tokens in bench.tokens:
        row_bytes = float(tokens * heads * c.head_dim * bench.itemsize)
        cos_sin, slots = bench.random(tokens, c.head_dim), bench.integers(torch.randperm(tokens))
        calls = []
        for _ in bench.copies(2 * row_bytes):
            qkv, caches = bench.random(tokens, heads, c.head_dim), kv_caches(bench, -(-tokens // BLOCK_SIZE))
            calls.append(_rope_and_store(qkv, c.num_kv_heads, cos_sin, *caches, slots, norm))
        yield Case("rope_and_store", f"{tokens} x {heads} x {c.head_dim}", calls, 2 * row_bytes + cos_sin.nbytes)


def _rope_and_store(qkv: Tensor, *arguments: Any) -> Call:
    return lambda: ops.rope_and_store(qkv, *arguments)


def kv_caches(bench: Bench, blocks: int) -> tuple[Tensor, Tensor]:
    shape = (blocks, BLOCK_SIZE, bench.config.num_kv_heads, bench.config.head_dim)
    return bench.random(*shape), bench.random(*shape)


def decode_attention(bench: Bench) -> Iterator[Case]:
    """One new token for each of B sequences of equal length, their blocks shuffled."""
    c = bench.config
    for context in bench.contexts:
        for batch in bench.tokens:
            if batch > 256:
                continue
            blocks = -(-context // BLOCK_SIZE)
            kv_bytes = 2.0 * batch * context * c.num_kv_heads * c.head_dim * bench.itemsize
            tables = bench.integers(torch.randperm(batch * blocks).view(batch, blocks))
            lengths = bench.integers([context] * batch)
            meta = ops.DecodeMeta(tables, lengths, (context,) * batch, BLOCK_SIZE)
            q = bench.random(batch, c.num_heads, c.head_dim)
            caches = [kv_caches(bench, batch * blocks) for _ in bench.copies(kv_bytes)]
            calls = [_decode(q, k_cache, v_cache, meta) for k_cache, v_cache in caches]
            flops = 4.0 * batch * context * c.num_heads * c.head_dim
            yield Case("decode attention", f"{batch} x {context}", calls, kv_bytes + 2 * q.nbytes, flops)


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: ops.DecodeMeta) -> Call:
    scale = q.shape[-1] ** -0.5
    return lambda: ops.paged_decode_attention(q, k_cache, v_cache, meta, scale)


def prefill_attention(bench: Bench) -> Iterator[Case]:
    """A fresh prompt, and its last quarter as a chunk after the rest."""
    c = bench.config
    for context in bench.prefills:
        blocks = -(-context // BLOCK_SIZE)
        tables = bench.integers(torch.randperm(blocks)[None])
        kv_bytes = 2.0 * context * c.num_kv_heads * c.head_dim * bench.itemsize
        caches = [kv_caches(bench, blocks) for _ in bench.copies(max(kv_bytes, COPIES_BYTES[bench.device] // 8))]
        for count in (context, max(context // 4, 1)):
            starts, contexts = (0, count), (context,)
            meta = ops.PrefillMeta(
                tables, bench.integers(starts), bench.integers(contexts), starts, contexts, BLOCK_SIZE
            )
            q = bench.random(count, c.num_heads, c.head_dim)
            out = torch.empty_like(q)
            pairs = count * (context - count) + count * (count + 1) / 2
            yield Case(
                "prefill attention",
                f"{count} of {context}",
                [_prefill(q, k_cache, v_cache, meta, out) for k_cache, v_cache in caches],
                kv_bytes + 2 * q.nbytes,
                4.0 * pairs * c.num_heads * c.head_dim,
            )


def _prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: ops.PrefillMeta, out: Tensor) -> Call:
    scale = q.shape[-1] ** -0.5
    return lambda: ops.paged_prefill_attention(q, k_cache, v_cache, meta, scale, out)


def copy_blocks(bench: Bench) -> Iterator[Case]:
    c, count = bench.config, 16
    nbytes = 2.0 * count * 2 * c.num_layers * BLOCK_SIZE * c.num_kv_heads * c.head_dim * bench.itemsize
    sources, targets = bench.integers(torch.arange(count)), bench.integers(torch.arange(count, 2 * count))
    shape = (c.num_layers, 2, 2 * count, BLOCK_SIZE, c.num_kv_heads, c.head_dim)
    caches = [bench.random(*shape) for _ in bench.copies(nbytes)]
    yield Case("copy_blocks", f"{count} blocks", [_copy(cache, sources, targets) for cache in caches], nbytes)


def _copy(cache: Tensor, sources: Tensor, targets: Tensor) -> Call:
    return lambda: ops.copy_blocks(cache, sources, targets)


# What an engine launches on a GPU: no batch is sampled in any other way (`engine.cuda.decode`).
PLAIN = ops.SamplingStages(noise=True)
FULL = ops.SamplingStages(penalties=True, bias=True, stops=True, filters=True, noise=True)


def sampling(bench: Bench) -> Iterator[Case]:
    """A draw for every row: greedy rows and random ones; with all stages where each row wants all, and none wants any.

    ``nbytes``: the logits once; penalties read counts and flags as well.
    """
    V = bench.config.vocab_size
    for rows in (tokens for tokens in bench.tokens if tokens <= 256):
        logits_bytes = 4.0 * rows * V
        logits = [bench.random(rows, V, dtype=torch.float32) for _ in bench.copies(logits_bytes)]
        slots, positions = bench.integers(range(rows)), bench.integers(range(100, 100 + rows))
        out = ops.SamplingOut.allocate(rows, torch.device(bench.device))
        for name, stages, random, everything in (
            ("sample plain, greedy rows", PLAIN, False, False),
            ("sample plain", PLAIN, True, False),
            ("sample full, greedy rows", FULL, False, False),
            ("sample full", FULL, True, True),
        ):
            state = _sampling_state(bench, rows, random, everything)
            calls = [_sample(x, slots, positions, state, stages, out) for x in logits]
            yield Case(name, f"{rows} x {V}", calls, logits_bytes * (2.25 if everything else 1))


def _sampling_state(bench: Bench, rows: int, random: bool, everything: bool) -> ops.SamplingTensors:
    """Slots at temperature 1 where ``random``; with penalties, a bias, a stop and filters where ``everything``.

    Logits are changed in place, and a case samples the same ones again and again: so the changes are next to nothing.
    """
    state = ops.SamplingTensors.allocate(rows, bench.config.vocab_size, 1, 1, torch.device(bench.device))
    state.seed_S.copy_(bench.integers(range(rows)))
    if random:
        state.temperature_S.fill_(1)
    if everything:
        state.top_k_S.fill_(50)
        state.top_p_S.fill_(0.95)
        state.counts_SV.random_(0, 2)
        state.in_prompt_SV.copy_(state.counts_SV > 0)
        state.presence_S.fill_(1e-30)
        state.num_bias_S.fill_(1)
        state.num_stops_S.fill_(1)
        state.stops_from_S.fill_(1000)
    return state


def _sample(logits: Tensor, *arguments: Any) -> Call:
    return lambda: ops.sample(logits, *arguments)


BUILDERS: list[Callable[[Bench], Iterator[Case]]] = [
    linear,
    norms,
    silu_mul,
    rope_and_store,
    decode_attention,
    prefill_attention,
    copy_blocks,
    sampling,
]
