"""EngineConfig: every knob of the engine, with one owner. Frozen; checked before anything is loaded."""

from dataclasses import dataclass

from engine.errors import ConfigError

BLOCK_SIZES = (8, 16, 32, 64)
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
KERNELS = ("auto", "separate", "reference")
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
DEFAULT_CPU_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to load and run a model.

    ``model``: a Hugging Face directory. ``device``: cpu or cuda. ``dtype`` auto = the checkpoint's.
    ``block_size`` tokens per KV block. ``num_gpu_blocks`` fixes the KV pool (on either device); else it is sized from
    memory: ``gpu_memory_utilization`` of the card on cuda (None = 0.9), ``cpu_kv_bytes`` on cpu (None = 1 GiB);
    of the three at most one may be set, and the last two only for their device. ``max_model_len`` None = the
    model's own context. ``max_num_seqs`` outputs in one batch; ``max_num_batched_tokens`` tokens in one step.
    ``max_inter_token_ms``: about how long a step with decoding outputs may take: the chunks of prompts beside them are
    made as short as that needs; None = no bound.
    ``pipeline_depth`` 1 = plain stepping, 2 = the next step is launched before the last one's tokens are known;
    None = 2 on cuda, and 1 on cpu, where nothing overlaps. ``max_queued_requests`` and ``max_queued_tokens`` bound
    the waiting queue. ``prefix_cache``: keep the KV of what was computed for requests that begin alike.
    ``show_progress`` draws bars at the start. ``random_weights``: a seed for random weights of the shape that
    config.json describes, for a directory without weights; None = read its safetensors.
    ``enforce_eager``: no CUDA graphs (they are used on cuda only). ``kernels``: "separate" launches one kernel per
    operation, "reference" the plain torch operations; both without graphs, to compare with.
    """

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    block_size: int = 16
    num_gpu_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    cpu_kv_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_inter_token_ms: float | None = None
    pipeline_depth: int | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 * 1024 * 1024
    show_progress: bool = False
    prefix_cache: bool = True
    random_weights: int | None = None
    enforce_eager: bool = False
    kernels: str = "auto"

    def __post_init__(self) -> None:
        for holds, message in self._rules():
            if not holds:
                raise ConfigError(message)

    def _rules(self) -> list[tuple[bool, str]]:
        def positive(name: str) -> tuple[bool, str]:
            value = getattr(self, name)
            return value is None or value > 0, f"{name} must be positive, got {value}"

        return [
            (self.device in DEVICES, f"device must be one of {', '.join(DEVICES)}, got {self.device!r}"),
            (self.kernels in KERNELS, f"kernels must be one of {', '.join(KERNELS)}, got {self.kernels!r}"),
            (
                self.device == "cuda" or not self.enforce_eager,
                "enforce_eager is for cuda; nothing is captured on a cpu",
            ),
            (self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}"),
            (self.block_size in BLOCK_SIZES, f"block_size must be one of {BLOCK_SIZES}, got {self.block_size}"),
            (
                self.gpu_memory_utilization is None or 0 < self.gpu_memory_utilization <= 1,
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}",
            ),
            (
                self.random_weights is None or 0 <= self.random_weights < 2**63,
                f"random_weights must be a seed from 0 to 2^63 - 1, got {self.random_weights}",
            ),
            (
                self.max_inter_token_ms is None or 0 < self.max_inter_token_ms < float("inf"),
                f"max_inter_token_ms must be positive milliseconds, got {self.max_inter_token_ms}",
            ),
            (self.pipeline_depth in (None, 1, 2), f"pipeline_depth must be 1 or 2, got {self.pipeline_depth}"),
            (
                self.device == "cuda" or self.gpu_memory_utilization is None,
                "gpu_memory_utilization is for cuda; on cpu set cpu_kv_bytes or num_gpu_blocks",
            ),
            (
                self.device == "cpu" or self.cpu_kv_bytes is None,
                "cpu_kv_bytes is for cpu; on cuda set gpu_memory_utilization or num_gpu_blocks",
            ),
            (
                self.num_gpu_blocks is None or (self.gpu_memory_utilization is None and self.cpu_kv_bytes is None),
                "num_gpu_blocks fixes the KV pool: set either it or a share of memory, not both",
            ),
            (
                self.max_num_batched_tokens >= self.max_num_seqs,
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs {self.max_num_seqs}: every running output takes one token of a step",
            ),
            *(
                positive(name)
                for name in (
                    "num_gpu_blocks",
                    "cpu_kv_bytes",
                    "max_model_len",
                    "max_num_seqs",
                    "max_num_batched_tokens",
                    "max_queued_requests",
                    "max_queued_tokens",
                )
            ),
        ]
