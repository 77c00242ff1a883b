"""Our model against transformers': modules and logits of small random models, greedy tokens of SmolLM2."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.config import load_model_config
from engine.model.loader import load_weights
from engine.model.rope import cos_sin_table, inverse_frequencies
from engine.model.transformer import ForwardBatch, Transformer
from engine.naive import ContiguousDecoder, RecomputeDecoder, load_naive
from engine.sampling_params import SamplingParams
from kernels import ops
from tests.engine.equality import check_equal_by_rule, check_greedy_by_rule
from tests.engine.models import load_reference, make_model

TOLERANCE = 1e-4
SHAPES: list[dict[str, Any]] = [
    {"kind": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 144},
    {"kind": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"kind": "qwen2", "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 96},
    {"kind": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
    {"kind": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128},
    {"kind": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64, "attention_bias": True},
]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
}


def make_qwen2(shape: dict[str, Any]) -> dict[str, Any]:
    """Qwen2 has no head_dim of its own: it is hidden_size / heads."""
    if shape["kind"] == "qwen2":
        shape = shape | {"hidden_size": shape["num_attention_heads"] * shape["head_dim"]}
    return shape


def whole_prompt(directory: Path, token_ids: list[int]) -> tuple[Transformer, ForwardBatch, torch.Tensor]:
    """The paged model, one prompt as its batch with blocks in a scrambled order, and a KV cache full of NaN."""
    block_size = 16
    config = load_model_config(directory)
    weights, _ = load_weights(directory, config, torch.float32, torch.device("cpu"), show_progress=False)
    num_blocks = -(-len(token_ids) // block_size)
    table = torch.randperm(num_blocks)
    shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
    positions = torch.arange(len(token_ids))
    batch = ForwardBatch(
        token_ids_T=torch.tensor(token_ids),
        cos_sin_TD=cos_sin_table(config, config.max_position_embeddings)[positions],
        slots_T=table[positions // block_size] * block_size + positions % block_size,
        num_decode=0,
        decode=None,
        prefill=ops.PrefillMeta(
            table[None],
            torch.tensor([0, len(token_ids)]),
            torch.tensor([len(token_ids)]),
            (0, len(token_ids)),
            (len(token_ids),),
            block_size,
        ),
    )
    return Transformer(config, weights), batch, torch.full(shape, float("nan"))


def forward_whole(directory: Path, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of one prompt through the paged model."""
    model, batch, kv_cache = whole_prompt(directory, token_ids)
    with torch.inference_mode():
        hidden = model.hidden_states(batch, kv_cache)
        return hidden, model.logits(hidden)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['kind']}-{s.get('num_attention_heads', 4)}h")
def test_hidden_states_and_logits_equal_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    shape = make_qwen2(dict(shape))
    directory = make_model(tmp_path, **shape)
    token_ids = random.Random(0).choices(range(512), k=77)
    hidden, logits = forward_whole(directory, token_ids)
    with torch.inference_mode():
        theirs = load_reference(directory)(torch.tensor([token_ids]), output_hidden_states=True)
    assert (hidden - theirs.hidden_states[-1][0]).abs().max() < TOLERANCE
    assert (logits - theirs.logits[0]).abs().max() < TOLERANCE
    assert logits.std() > 0.1, "logits this flat would hide errors"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['kind']}-{s.get('num_attention_heads', 4)}h")
def test_every_module_equals_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Each of our parts, given what transformers' module was given, returns what that module returned."""
    directory = make_model(tmp_path, **make_qwen2(dict(shape)))
    reference = load_reference(directory)
    seen = record_modules(reference)
    token_ids = random.Random(0).choices(range(512), k=40)
    with torch.inference_mode():
        reference(torch.tensor([token_ids]))
    model, batch, kv_cache = whole_prompt(directory, token_ids)
    weights, eps = model.weights, model.config.norm_eps
    with torch.inference_mode():
        ours = {
            "model.embed_tokens": weights.embedding_VH[batch.token_ids_T],
            "model.norm": ops.rmsnorm(seen["model.norm"][0], weights.final_norm_H, eps),
            "lm_head": model.logits(seen["lm_head"][0]),
        }
        for i, layer in enumerate(weights.layers):
            name = f"model.layers.{i}."
            given = {part: seen[name + part][0] for part in PARTS}
            ours[name + "input_layernorm"] = ops.rmsnorm(given["input_layernorm"], layer.input_norm_H, eps)
            ours[name + "self_attn"] = model._attention(
                given["self_attn"], layer, batch, kv_cache[i, 0], kv_cache[i, 1]
            )
            after = given["post_attention_layernorm"]
            ours[name + "post_attention_layernorm"] = ops.rmsnorm(after, layer.post_norm_H, eps)
            ours[name + "mlp"] = model._mlp(given["mlp"], layer)
    assert ours.keys() == seen.keys()
    for name, (_, theirs) in seen.items():
        assert (ours[name] - theirs).abs().max() < TOLERANCE, name


PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def record_modules(reference: torch.nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Filled by the next forward pass: what went into and came out of each module, without the batch dimension."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def keep(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            out = output[0] if isinstance(output, tuple) else output
            seen[name] = given[0].clone(), out[0].clone()

        return keep

    for name, module in reference.named_modules():
        if name in ("model.embed_tokens", "model.norm", "lm_head") or name.rpartition(".")[2] in PARTS:
            module.register_forward_hook(hook(name), with_kwargs=True)
    return seen


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rope_scalings_equal_transformers(tmp_path: Path, kind: str, name: str) -> None:
    directory = make_model(tmp_path, kind, rope_parameters=ROPES[name])
    reference = load_reference(directory)
    config = load_model_config(directory)
    ours, factor = inverse_frequencies(config)
    if name != "default":
        theirs, their_factor = ROPE_INIT_FUNCTIONS[name](reference.config, torch.device("cpu"))
        assert torch.allclose(ours, theirs, rtol=1e-6)
        assert factor == pytest.approx(their_factor)
    token_ids = random.Random(1).choices(range(512), k=400)
    _, logits = forward_whole(directory, token_ids)
    with torch.inference_mode():
        assert (logits - reference(torch.tensor([token_ids])).logits[0]).abs().max() < TOLERANCE


def varied_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Chat and plain, 1 to 1,500 tokens, English, other scripts, code and noise."""
    rng = random.Random(7)
    texts = [
        "What is the capital of France?",
        "Explain how a bicycle stays upright.",
        "def fibonacci(n):\n    ",
        "今天天气很好，我们去",
        "Напиши короткое стихотворение о зиме.",
        "La economía de un país depende de",
        "🙂🙃 emoji and ünïcödé: ",
        "1, 1, 2, 3, 5, 8,",
        "Write a haiku about the sea.",
        "SELECT name FROM users WHERE",
    ]
    prompts = []
    for i in range(count):
        text = rng.choice(texts) * rng.choice([1, 1, 1, 3])
        if i % 2:
            messages = [{"role": "user", "content": text}]
            prompts.append(list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]))
        else:
            prompts.append(tokenizer(text)["input_ids"])
    lengths = [1, 2, 15, 16, 17, 100, 255, 256, 700, 1500]
    for i, length in enumerate(lengths):
        prompts[i * (count // len(lengths))] = rng.choices(range(17, 49152), k=length)
    return prompts


def test_smollm2_greedy_equals_transformers(smollm2_dir: Path, device: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    prompts = varied_prompts(tokenizer, 50)
    assert min(map(len, prompts)) == 1
    assert max(map(len, prompts)) == 1500
    engine = Engine(EngineConfig(model=str(smollm2_dir), device=device, dtype="float32"))
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    ours = [result.token_ids for result in engine.generate(prompts, params)]
    reference = load_reference(smollm2_dir)

    def scores_along(i: int, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([prompts[i] + tokens[:-1]])
            out: torch.Tensor = reference(ids, logits_to_keep=len(tokens)).logits[0]
        return out

    check_greedy_by_rule(ours, scores_along)


def test_smollm2_greedy_equals_transformers_own_generate(smollm2_dir: Path, device: str) -> None:
    """The same through transformers' generate, which walks its own KV cache; few prompts, because it is slow."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    prompts = varied_prompts(tokenizer, 50)[1:5]
    engine = Engine(EngineConfig(model=str(smollm2_dir), device=device, dtype="float32", num_gpu_blocks=100))
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    ours = [result.token_ids for result in engine.generate(prompts, params)]
    reference = load_reference(smollm2_dir)

    def scores(i: int, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            out: torch.Tensor = reference(torch.tensor([prompts[i] + tokens])).logits[0, -1]
        return out

    check_equal_by_rule(ours, [transformers_greedy(reference, prompt, 32) for prompt in prompts], scores)


def transformers_greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def test_naive_decoders_equal_the_engine(smollm2_dir: Path, device: str) -> None:
    config, weights = load_naive(smollm2_dir)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    prompts = [tokenizer(text)["input_ids"] for text in ("The capital of France is", "def add(a, b):", "水")]
    engine = Engine(EngineConfig(model=str(smollm2_dir), device=device, dtype="float32", num_gpu_blocks=64))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    ours = [result.token_ids for result in engine.generate(prompts, params)]
    recompute, contiguous = RecomputeDecoder(config, weights), ContiguousDecoder(config, weights)

    def scores(i: int, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return recompute._model.forward(prompts[i] + tokens, None)[0]

    check_equal_by_rule(ours, [recompute.generate(prompt, 12) for prompt in prompts], scores)
    check_equal_by_rule(ours, [contiguous.generate(prompt, 12) for prompt in prompts], scores)
