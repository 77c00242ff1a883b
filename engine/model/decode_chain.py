"""A decode step on a GPU as a chain of few kernels over static buffers: what a CUDA graph captures.

Forms, by the number of rows: one row streams the weights through `kernels.gpu.gemv` with everything else folded in
(six kernels a layer); 2 to 64 rows use products with the weights as the large operand (nine kernels a layer, or seven
with the norms folded in); more rows use cuBLAS. Shapes:
B rows, H hidden, N query heads, K KV heads, D head_dim, A = N + 2K, I intermediate, V vocabulary, S partial sums.
"""

from dataclasses import replace

import torch
from torch import Tensor

from engine.model.transformer import LayerWeights, Transformer
from kernels.gpu import activation, cache, decode_attention, gemv, norm, skinny_gemm, step
from kernels.gpu.tiles import gemv_tile, skinny_tile
from kernels.reference.attention import DecodeMeta
from kernels.reference.cache import HeadNorms
from kernels.reference.step import DecodeInputs, DecodeRows

MAX_SKINNY = skinny_gemm.MAX_TOKENS


class DecodeChain:
    """One model's decode step. Owns the activations; weights, KV cache and rows belong to others.

    ``run(B)`` computes the first B rows of ``rows.row_slots_B``: float32 ``logits_BV`` and ``inputs.next_positions_B``.
    Everything it allocates is allocated here, so a capture of ``run`` needs no memory but cuBLAS's.
    """

    def __init__(
        self,
        model: Transformer,
        kv_cache: Tensor,
        rows: DecodeRows,
        cos_sin_PD: Tensor,
        workspace: "DecodeBuffers",
        fold_norms_upto: int = 0,
    ) -> None:
        """``fold_norms_upto`` rows the narrow products compute the norms themselves."""
        self._config, self._weights = model.config, model.weights
        self._rows, self._cos_sin_PD, self._buffers = rows, cos_sin_PD, workspace
        self._caches = [(kv_cache[layer, 0], kv_cache[layer, 1]) for layer in range(self._config.num_layers)]
        self._scale = self._config.head_dim**-0.5
        self._fused = not self._config.qk_norm
        self._fold_norms_upto = fold_norms_upto

    def run(self, num_rows: int, *, pdl: bool) -> None:
        """Launch the step for ``num_rows`` rows. ``pdl`` holds for the forms without cuBLAS."""
        rows = replace(self._rows, row_slots_B=self._rows.row_slots_B[:num_rows])
        inputs = self._buffers.inputs_of(num_rows)
        step.begin_decode(rows, self._weights.embedding_VH, self._cos_sin_PD, inputs)
        meta = DecodeMeta(rows.block_tables_SM, inputs.context_lens_B, None, rows.block_size, rows.row_slots_B, None)
        if num_rows == 1 and self._fused:
            self._run_one(inputs, meta, pdl)
        elif num_rows <= self._fold_norms_upto:
            self._run_folded(num_rows, inputs, meta, pdl)
        elif num_rows <= MAX_SKINNY:
            self._run_skinny(num_rows, inputs, meta, pdl)
        else:
            self._run_wide(num_rows, inputs, meta)

    def _attend(self, B: int, layer: int, meta: DecodeMeta, pdl: bool) -> None:
        buffers = self._buffers
        k_cache, v_cache = self._caches[layer]
        decode_attention.paged_decode_attention(
            buffers.q_BND[:B], k_cache, v_cache, meta, self._scale,
            out=buffers.attended_BND[:B], workspace=buffers.attention_floats, pdl=pdl,
        )  # fmt: skip

    # -- one row ------------------------------------------------------------------------------------------------

    def _run_one(self, inputs: DecodeInputs, meta: DecodeMeta, pdl: bool) -> None:
        config, buffers, eps = self._config, self._buffers, self._config.norm_eps
        H, I, A = config.hidden_size, config.intermediate_size, config.num_heads + 2 * config.num_kv_heads  # noqa: E741
        x_H, q_ND = inputs.x_BH[0], buffers.q_BND[0]
        attended = buffers.attended_BND[0].flatten()
        qkv_tile = gemv_tile("qkv", A * config.head_dim, H, config.head_dim // 2)
        o_tile, down_tile = gemv_tile("add", H, len(attended)), gemv_tile("add", H, I)
        gate_up_tile = gemv_tile("gate_up", 2 * I, H)
        for index, layer in enumerate(self._weights.layers):
            k_cache, v_cache = self._caches[index]
            # The first waits for begin_decode as a whole: what that wrote is complete for all kernels that follow.
            gemv.norm_qkv_rope_store(
                x_H, layer.input_norm_H, eps, layer.qkv, layer.qkv_bias, inputs.cos_sin_BD[0], q_ND,
                k_cache, v_cache, inputs.kv_slots_B, qkv_tile, pdl=pdl and index > 0,
            )  # fmt: skip
            self._attend(1, index, meta, pdl)
            gemv.gemv_add(attended, layer.o, layer.o_bias, x_H, o_tile, pdl=pdl)
            act_I = buffers.act_BI[0]
            gemv.norm_gate_up_silu(
                x_H, layer.post_norm_H, eps, layer.gate_up, layer.gate_up_bias, act_I, gate_up_tile, pdl=pdl
            )
            gemv.gemv_add(act_I, layer.down, layer.down_bias, x_H, down_tile, pdl=pdl)
        head_tile = gemv_tile("head", config.vocab_size, H)
        gemv.norm_head(
            x_H, self._weights.final_norm_H, eps, self._weights.head_VH, buffers.logits_BV[0], head_tile, pdl=pdl
        )

    # -- 2 to 64 rows -------------------------------------------------------------------------------------------

    def _run_skinny(self, B: int, inputs: DecodeInputs, meta: DecodeMeta, pdl: bool) -> None:
        config, buffers, eps = self._config, self._buffers, self._config.norm_eps
        x_BH, normed_BH, act_BI = inputs.x_BH, buffers.normed_BH[:B], buffers.act_BI[:B]
        attended_BO, I = buffers.attended_BND[:B].flatten(1), config.intermediate_size  # noqa: E741
        gate_up_tile = skinny_tile("gate_up", 2 * I, config.hidden_size, B)
        # Without dependent launch: what begin_decode wrote is complete for all kernels that follow.
        norm.rmsnorm(x_BH, self._weights.layers[0].input_norm_H, eps, out=normed_BH)
        for index, layer in enumerate(self._weights.layers):
            qkv_SBO = self._partial(normed_BH, layer.qkv, layer.qkv_bias, pdl)
            self._rope(index, layer, qkv_SBO.unflatten(2, (-1, config.head_dim)), inputs, pdl)
            self._attend(B, index, meta, pdl)
            o_SBH = self._partial(attended_BO, layer.o, layer.o_bias, pdl)
            norm.add_rmsnorm(o_SBH, x_BH, layer.post_norm_H, eps, out=normed_BH, pdl=pdl)
            skinny_gemm.skinny_gate_up_silu(normed_BH, layer.gate_up, layer.gate_up_bias, act_BI, gate_up_tile, pdl=pdl)
            down_SBH = self._partial(act_BI, layer.down, layer.down_bias, pdl)
            norm.add_rmsnorm(down_SBH, x_BH, self._next_norm(index), eps, out=normed_BH, pdl=pdl)
        tile = skinny_tile("head", config.vocab_size, config.hidden_size, B)
        logits_BV = buffers.logits_BV[:B]
        skinny_gemm.skinny_gemm(normed_BH, self._weights.head_VH, None, logits_BV[None], tile, pdl=pdl)

    def _run_folded(self, B: int, inputs: DecodeInputs, meta: DecodeMeta, pdl: bool) -> None:
        """No norm has a kernel of its own: products read the float32 residual stream and add to it in place."""
        config, buffers, eps = self._config, self._buffers, self._config.norm_eps
        x_BH, act_BI, q_size = inputs.x_BH, buffers.act_BI[:B], len(self._weights.layers[0].qkv)
        attended_BO, I = buffers.attended_BND[:B].flatten(1), config.intermediate_size  # noqa: E741
        H = config.hidden_size
        qkv_SBO = buffers.partial_floats[: B * q_size].view(1, B, q_size)
        qkv_tile, o_tile = skinny_tile("folded", q_size, H, B), skinny_tile("folded", H, attended_BO.shape[1], B)
        gate_up_tile, down_tile = skinny_tile("folded_gate_up", 2 * I, H, B), skinny_tile("folded", H, I, B)
        head_tile = skinny_tile("head", config.vocab_size, H, B)
        for index, layer in enumerate(self._weights.layers):
            # The first waits for begin_decode as a whole: what that wrote is complete for all kernels that follow.
            skinny_gemm.skinny_gemm(
                x_BH, layer.qkv, layer.qkv_bias, qkv_SBO, qkv_tile, norm_I=layer.input_norm_H, eps=eps,
                pdl=pdl and index > 0,
            )  # fmt: skip
            self._rope(index, layer, qkv_SBO[0].unflatten(1, (-1, config.head_dim)), inputs, pdl)
            self._attend(B, index, meta, pdl)
            skinny_gemm.skinny_gemm(attended_BO, layer.o, layer.o_bias, x_BH[None], o_tile, add=True, pdl=pdl)
            skinny_gemm.skinny_gate_up_silu(
                x_BH, layer.gate_up, layer.gate_up_bias, act_BI, gate_up_tile, norm_H=layer.post_norm_H, eps=eps,
                pdl=pdl,
            )  # fmt: skip
            skinny_gemm.skinny_gemm(act_BI, layer.down, layer.down_bias, x_BH[None], down_tile, add=True, pdl=pdl)
        skinny_gemm.skinny_gemm(
            x_BH, self._weights.head_VH, None, buffers.logits_BV[:B][None], head_tile,
            norm_I=self._weights.final_norm_H, eps=eps, pdl=pdl,
        )  # fmt: skip

    def _partial(self, a_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, pdl: bool) -> Tensor:
        """Partial sums [S, B, O] in the shared buffer, which the next kernel reads and nobody after it."""
        tile = skinny_tile("gemm", weight_OI.shape[0], weight_OI.shape[1], len(a_BI))
        shape = (tile.splits, len(a_BI), len(weight_OI))
        out_SBO = self._buffers.partial_floats[: shape[0] * shape[1] * shape[2]].view(shape)
        skinny_gemm.skinny_gemm(a_BI, weight_OI, bias_O, out_SBO, tile, pdl=pdl)
        return out_SBO

    def _rope(self, index: int, layer: LayerWeights, qkv: Tensor, inputs: DecodeInputs, pdl: bool) -> None:
        config = self._config
        k_cache, v_cache = self._caches[index]
        head_norms = None
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            head_norms = HeadNorms(layer.q_norm_D, layer.k_norm_D, config.norm_eps)
        cache.rope_and_store(
            qkv, config.num_kv_heads, inputs.cos_sin_BD, k_cache, v_cache, inputs.kv_slots_B, head_norms,
            out=self._buffers.q_BND[: len(inputs.x_BH)], pdl=pdl,
        )  # fmt: skip

    def _next_norm(self, index: int) -> Tensor:
        layers = self._weights.layers
        return layers[index + 1].input_norm_H if index + 1 < len(layers) else self._weights.final_norm_H

    # -- more rows ----------------------------------------------------------------------------------------------

    def _run_wide(self, B: int, inputs: DecodeInputs, meta: DecodeMeta) -> None:
        config, buffers, eps = self._config, self._buffers, self._config.norm_eps
        x_BH, normed_BH, act_BI = inputs.x_BH, buffers.normed_BH[:B], buffers.act_BI[:B]
        qkv_BO, gate_up_BO, out_BH = buffers.qkv_BO[:B], buffers.gate_up_BO[:B], buffers.out_BH[:B]
        norm.rmsnorm(x_BH, self._weights.layers[0].input_norm_H, eps, out=normed_BH)
        for index, layer in enumerate(self._weights.layers):
            _product(normed_BH, layer.qkv, layer.qkv_bias, qkv_BO)
            self._rope(index, layer, qkv_BO.unflatten(1, (-1, config.head_dim)), inputs, False)
            self._attend(B, index, meta, False)
            _product(buffers.attended_BND[:B].flatten(1), layer.o, layer.o_bias, out_BH)
            norm.add_rmsnorm(out_BH, x_BH, layer.post_norm_H, eps, out=normed_BH)
            _product(normed_BH, layer.gate_up, layer.gate_up_bias, gate_up_BO)
            activation.silu_mul(gate_up_BO, out=act_BI)
            _product(act_BI, layer.down, layer.down_bias, out_BH)
            norm.add_rmsnorm(out_BH, x_BH, self._next_norm(index), eps, out=normed_BH)
        logits_BV, head = buffers.logits_BV[:B], self._weights.head_VH.t()
        if normed_BH.dtype == torch.float32:
            torch.mm(normed_BH, head, out=logits_BV)
        else:
            torch.mm(normed_BH, head, out_dtype=torch.float32, out=logits_BV)


def _product(a_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_BO: Tensor) -> None:
    if bias_O is None:
        torch.mm(a_BI, weight_OI.t(), out=out_BO)
    else:
        torch.addmm(bias_O, a_BI, weight_OI.t(), out=out_BO)


class DecodeBuffers:
    """The activations of a decode step of up to ``max_rows`` rows: one allocation each, used by all buckets."""

    def __init__(self, model: Transformer, max_rows: int) -> None:
        config, embedding = model.config, model.weights.embedding_VH
        H, D, N, K = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
        O, I = (N + 2 * K) * D, config.intermediate_size  # noqa: E741

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=embedding.device)

        half, full = embedding.dtype, torch.float32
        self._inputs = DecodeInputs(
            x_BH=empty(full, max_rows, H),
            cos_sin_BD=empty(full, max_rows, D),
            kv_slots_B=empty(torch.int64, max_rows),
            context_lens_B=empty(torch.int32, max_rows),
            next_positions_B=empty(torch.int64, max_rows),
        )
        self.normed_BH, self.out_BH = empty(half, max_rows, H), empty(half, max_rows, H)
        self.q_BND, self.attended_BND = empty(half, max_rows, N, D), empty(half, max_rows, N, D)
        self.qkv_BO, self.gate_up_BO = empty(half, max_rows, O), empty(half, max_rows, 2 * I)
        self.act_BI = empty(half, max_rows, I)
        self.logits_BV = empty(full, max_rows, config.vocab_size)
        self.partial_floats = empty(full, self._partial_floats(model, min(max_rows, MAX_SKINNY)))
        floats = [
            decode_attention.workspace_floats(rows, N, D, decode_attention.decode_plan(rows, K))
            for rows in range(1, max_rows + 1)
        ]
        self.attention_floats = empty(full, max(floats))

    @staticmethod
    def _partial_floats(model: Transformer, max_rows: int) -> int:
        layer = model.weights.layers[0]
        return max(
            skinny_tile("gemm", weight.shape[0], weight.shape[1], rows).splits * rows * len(weight)
            for weight in (layer.qkv, layer.o, layer.down)
            for rows in range(1, max_rows + 1)
        )

    def inputs_of(self, num_rows: int) -> DecodeInputs:
        """The first ``num_rows`` rows of every input buffer."""
        full = self._inputs
        return DecodeInputs(
            full.x_BH[:num_rows],
            full.cos_sin_BD[:num_rows],
            full.kv_slots_B[:num_rows],
            full.context_lens_B[:num_rows],
            full.next_positions_B[:num_rows],
        )
