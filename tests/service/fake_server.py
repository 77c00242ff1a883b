"""``python -m tests.service.fake_server``: the real server around `FakeEngine`. Two options more."""

import functools
import sys

from service.engine_process import EngineProcessOptions
from service.log import set_up_logging
from service.model_source import model_directory
from service.options import build_parser, serve_options
from service.supervisor import Supervisor
from tests.service.fake_engine import FakeEngine


def main() -> int:
    parser = build_parser()
    parser.add_argument("--fake-step-time", type=float, default=0.001)
    parser.add_argument("--fake-load-time", type=float, default=0.0)
    arguments = parser.parse_args()
    set_up_logging(arguments.log_level, "supervisor")
    options = serve_options(arguments, model_directory(arguments.model))
    factory = functools.partial(FakeEngine, step_time=arguments.fake_step_time, load_time=arguments.fake_load_time)
    return Supervisor(options, EngineProcessOptions(options.engine, options.log_level, factory)).run()


if __name__ == "__main__":
    sys.exit(main())
