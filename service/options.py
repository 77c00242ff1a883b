"""The server's options: one frozen object, made from the command line, and the command line itself."""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.config import BLOCK_SIZES, DEVICES, DTYPES, EngineConfig
from engine.errors import ConfigError
from service.log import LEVELS

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
MAX_DRAIN_SECONDS = 24 * 3600.0  # for lame duck and drain each; no request lives nearly as long
MAX_FRONT_PROCESSES = 64
_DEFAULTS = EngineConfig(model="")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """``model`` is a name or directory as given; ``engine.model`` the directory it stands for. Times in seconds."""

    model: str
    served_model_name: str
    engine: EngineConfig
    listen: str = "127.0.0.1:50051"
    admin_listen: str = "127.0.0.1:50052"
    lame_duck: float = 5.0
    drain_timeout: float = 60.0
    slow_consumer_timeout: float = 30.0
    front_processes: int = 1
    log_level: str = "info"
    insecure: bool = False
    ready_file: str | None = None

    def __post_init__(self) -> None:
        for name, address in (("--listen", self.listen), ("--admin-listen", self.admin_listen)):
            _check_address(name, address, self.insecure)
        if not self.served_model_name or not self.served_model_name.isprintable():
            raise ConfigError(f"--served-model-name must be a printable name, got {self.served_model_name!r}")
        for name in ("lame_duck", "drain_timeout"):
            if not 0 <= (value := getattr(self, name)) <= MAX_DRAIN_SECONDS:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} must be 0 or more seconds, at most {MAX_DRAIN_SECONDS:.0f}, got {value}")
        if not 0 < self.slow_consumer_timeout < float("inf"):
            raise ConfigError(f"--slow-consumer-timeout must be above 0 seconds, got {self.slow_consumer_timeout}")
        if not 1 <= self.front_processes <= MAX_FRONT_PROCESSES:
            raise ConfigError(f"--front-processes must be 1 to {MAX_FRONT_PROCESSES}, got {self.front_processes}")
        if self.front_processes > 1 and self.listen.startswith("unix:"):
            raise ConfigError(
                f"--front-processes {self.front_processes}: only one process can listen on a unix socket; "
                f"give --listen a HOST:PORT instead of {self.listen}"
            )
        if self.ready_file is not None and not Path(self.ready_file).absolute().parent.is_dir():
            raise ConfigError(f"--ready-file {self.ready_file}: there is no such directory")
        if self.ready_file is not None and Path(self.ready_file).is_dir():
            raise ConfigError(f"--ready-file {self.ready_file} is a directory; it must be a file")

    def effective(self) -> dict[str, str | float | bool | None]:
        """Every option with its value in force, flat."""
        own = asdict(self)
        engine = own.pop("engine")
        engine.pop("model")
        engine.pop("show_progress")
        return {**own, **engine, "model_directory": self.engine.model}


def _check_address(option: str, address: str, insecure: bool) -> None:
    if address.startswith("unix:"):
        if address == "unix:":
            raise ConfigError(f"{option} unix: needs a path, as in unix:/run/picovllm.sock")
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} must be HOST:PORT or unix:PATH, got {address!r}")
    if host not in LOOPBACK and not insecure:
        raise ConfigError(
            f"{option} {address} is not loopback and the connection is not encrypted; "
            "listen on 127.0.0.1 or unix:PATH, or add --insecure"
        )


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Tells a default only where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """An unknown option ends the program with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="picovllm-serve", description="Serve a language model over gRPC.", allow_abbrev=False,
        formatter_class=_Help,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR|smollm2|HUB_ID", help="what to serve")
    add("--served-model-name", metavar="NAME", help="its name for clients; unset = the last part of --model")
    add("--listen", default="127.0.0.1:50051", metavar="HOST:PORT|unix:PATH", help="for inference; port 0 = a free one")
    add("--admin-listen", default="127.0.0.1:50052", metavar="HOST:PORT|unix:PATH", help="for administration")
    add("--insecure", action="store_true", help="allow plaintext beyond loopback")
    add("--lame-duck", type=float, default=5.0, metavar="SECONDS", help="not ready but accepting, before draining")
    add("--drain-timeout", type=float, default=60.0, metavar="SECONDS", help="for accepted requests while draining")
    add("--slow-consumer-timeout", type=float, default=30.0, metavar="SECONDS", help="for one write")
    add("--front-processes", type=int, default=1, metavar="N", help="that share the port of --listen")
    add("--log-level", choices=LEVELS, default="info", help="of all processes")
    add("--ready-file", metavar="PATH", help="written, as JSON with the addresses, once the server is ready")
    _add_engine_options(parser)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=DEVICES, default=_DEFAULTS.device, help="where the model runs")
    add("--dtype", choices=DTYPES, default=_DEFAULTS.dtype, help="of weights and activations; auto = the checkpoint's")
    add("--block-size", type=int, choices=BLOCK_SIZES, default=_DEFAULTS.block_size, help="tokens per KV block")
    add("--num-gpu-blocks", type=int, metavar="N", help="size of the KV pool; unset = from free memory")
    add("--gpu-memory-utilization", type=float, metavar="X", help="share of the card on cuda; unset = 0.9")
    add("--cpu-kv-bytes", type=int, metavar="BYTES", help="size of the KV pool on cpu; unset = 1 GiB")
    add(
        "--prefix-cache", action=argparse.BooleanOptionalAction, default=_DEFAULTS.prefix_cache,
        help="keep what was computed for requests that begin alike",
    )
    add("--max-model-len", type=int, metavar="TOKENS", help="context; unset = the model's own")
    add("--max-num-seqs", type=int, default=_DEFAULTS.max_num_seqs, metavar="N", help="outputs in one batch")
    add("--max-num-batched-tokens", type=int, default=_DEFAULTS.max_num_batched_tokens, metavar="N", help="in one step")
    add("--max-inter-token-ms", type=float, metavar="MS", help="of a step with decoding outputs; unset = no bound")
    add("--max-queued-requests", type=int, default=_DEFAULTS.max_queued_requests, metavar="N", help="that wait")
    add("--max-queued-tokens", type=int, default=_DEFAULTS.max_queued_tokens, metavar="N", help="of prompts that wait")
    add("--pipeline-depth", type=int, choices=(1, 2), help="steps in flight; unset = 2 on cuda, 1 on cpu")
    add("--random-weights", type=int, metavar="SEED", help="for a directory without weights: make them up")
    add("--enforce-eager", action="store_true", help="without CUDA graphs")


def engine_config(arguments: argparse.Namespace, directory: str) -> EngineConfig:
    """Raises `ConfigError`."""
    return EngineConfig(
        model=directory,
        device=arguments.device,
        dtype=arguments.dtype,
        block_size=arguments.block_size,
        num_gpu_blocks=arguments.num_gpu_blocks,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        cpu_kv_bytes=arguments.cpu_kv_bytes,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_inter_token_ms=arguments.max_inter_token_ms,
        pipeline_depth=arguments.pipeline_depth,
        max_queued_requests=arguments.max_queued_requests,
        max_queued_tokens=arguments.max_queued_tokens,
        show_progress=True,
        prefix_cache=arguments.prefix_cache,
        random_weights=arguments.random_weights,
        enforce_eager=arguments.enforce_eager,
    )


def serve_options(arguments: argparse.Namespace, directory: str) -> ServeOptions:
    """Raises `ConfigError`."""
    name = arguments.served_model_name
    if name is None:
        name = arguments.model.rstrip("/").rpartition("/")[2]
    return ServeOptions(
        model=arguments.model,
        served_model_name=name,
        engine=engine_config(arguments, directory),
        listen=arguments.listen,
        admin_listen=arguments.admin_listen,
        lame_duck=arguments.lame_duck,
        drain_timeout=arguments.drain_timeout,
        slow_consumer_timeout=arguments.slow_consumer_timeout,
        front_processes=arguments.front_processes,
        log_level=arguments.log_level,
        insecure=arguments.insecure,
        ready_file=arguments.ready_file,
    )
