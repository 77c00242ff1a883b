"""The front processes: gRPC servers, tokenizer and text, admission. Free of torch; never touch a GPU."""

import asyncio
import sys
from multiprocessing.connection import Connection

from engine.errors import EngineError
from service.control_front import ControlFront
from service.front_base import Front
from service.front_ready import FrontProcessOptions, FrontWiring
from service.further_front import FurtherFront
from service.log import set_up_logging
from service.process import ExitCode, bind_life_to_parent


def front_main(options: FrontProcessOptions, wiring: FrontWiring, supervisor: Connection) -> None:
    """Entry point of each. Exit codes: 0 after an orderly end, 1 when something it needs died, 2 cannot start."""
    bind_life_to_parent()
    set_up_logging(options.serve.log_level, options.name)
    try:
        code = asyncio.run(_run(options, wiring, supervisor))
    except EngineError as error:
        supervisor.send(str(error))
        code = ExitCode.UNUSABLE
    sys.exit(code)


async def _run(options: FrontProcessOptions, wiring: FrontWiring, supervisor: Connection) -> ExitCode:
    kind = FurtherFront if options.index else ControlFront
    front: Front = kind(options, wiring, supervisor)
    await front.start()
    return await front.serve()
