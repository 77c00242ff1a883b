"""vLLM 0.26.0's figures, quoted: measured once on the same kind of GPU, shown only beside the shape they belong to."""

import torch

SOURCE = "vLLM 0.26.0, measured on the same kind of GPU, docs/performance"
SHAPE, GPU = "qwen2.5-1.5b", "H200"

# (batch, prompt): tokens per second; prompt 128 with 256 new tokens, batch 1 with its prompt.
DECODE = {(1, 16): 461.0, (1, 1024): 480.0, (8, 128): 4206.0, (32, 128): 14_682.0, (128, 128): 37_077.0}
# (prompt, prompts at once): milliseconds to the first token of all of them, nothing cached.
PREFILL = {(144, 1): 15.4, (2118, 1): 27.5, (2118, 8): 106.0, (8192, 1): 54.0}
# (chunk budget, arrivals per second): gap p50, p90, p99, the prompts' time to first token, in milliseconds.
MIXED: dict[tuple[int, float], tuple[float, float, float, float | None]] = {
    (16_384, 0): (2.5, 2.8, 3.2, None),
    (16_384, 5): (2.6, 3.2, 20.3, 29.0),
    (16_384, 15): (3.2, 4.1, 33.3, 36.0),
    (16_384, 30): (4.1, 32.4, 34.1, 34.0),
    (512, 0): (2.9, 3.3, 4.0, None),
    (512, 5): (2.8, 3.4, 13.0, 55.0),
    (512, 15): (2.9, 10.2, 14.4, 49.0),
    (512, 30): (10.6, 13.7, 14.7, 501.0),
}


def comparable(shape: str | None, device: str, dtype: str) -> bool:
    """Whether the figures may stand beside ours: same shape, same kind of GPU, bfloat16."""
    if shape != SHAPE or device != "cuda" or dtype != "bfloat16":
        return False
    return GPU in torch.cuda.get_device_name()
