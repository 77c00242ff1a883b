"""``python -m service`` and ``picovllm-serve``."""

import sys
from collections.abc import Sequence

from engine.errors import EngineError
from service.engine_process import EngineProcessOptions
from service.log import set_up_logging
from service.model_source import model_directory
from service.options import build_parser, serve_options
from service.process import ExitCode
from service.supervisor import Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to stop; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    set_up_logging(arguments.log_level, "supervisor")
    try:
        serve_options(arguments, "")  # every option is checked before a model is downloaded
        options = serve_options(arguments, model_directory(arguments.model))
    except EngineError as error:
        print(f"picovllm-serve: {error}", file=sys.stderr)
        return ExitCode.UNUSABLE
    engine = EngineProcessOptions(options.engine, options.log_level)
    return Supervisor(options, engine).run()


if __name__ == "__main__":
    sys.exit(main())
