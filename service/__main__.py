"""``python -m service`` and ``picovllm-serve``."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from engine.errors import ConfigError, EngineError
from service.engine_process import EngineProcessOptions
from service.log import set_up_logging
from service.model_source import model_directory
from service.options import build_parser, serve_options
from service.process import ExitCode
from service.supervisor import Supervisor

# The import names of the extra `serve`, without triton, which is not everywhere.
_SERVER_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "grpc_health", "grpc_reflection", "tqdm", "jinja2",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to stop; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    set_up_logging(arguments.log_level, "supervisor")
    try:
        _check_packages()
        serve_options(arguments, "")  # every option is checked before a model is downloaded
        options = serve_options(arguments, model_directory(arguments.model))
    except EngineError as error:
        print(f"picovllm-serve: {error}", file=sys.stderr)
        return ExitCode.UNUSABLE
    engine = EngineProcessOptions(options.engine, options.log_level)
    return Supervisor(options, engine).run()


def _check_packages() -> None:
    """The wheel alone brings the client's packages only. Raises `ConfigError`."""
    if missing := [name for name in _SERVER_PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"the server's packages are not installed ({', '.join(missing)}); install the extra `serve`, "
            "such as with: pip install '.[serve]' in a clone of picovllm"
        )


if __name__ == "__main__":
    sys.exit(main())
