"""Logging of all processes: one line per event on stderr. Request ids yes, prompt text never."""

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname).1s {process} %(name)s: %(message)s"


def set_up_logging(level: str, process: str) -> None:
    """Replaces the root's handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(process=process), datefmt="%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc").setLevel(logging.WARNING)  # at debug it writes a line per call of its own
