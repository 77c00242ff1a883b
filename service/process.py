"""What every child process of an instance does first, and the exit codes of the instance."""

import ctypes
import multiprocessing
import os
import signal
from enum import IntEnum

_PR_SET_PDEATHSIG = 1


class ExitCode(IntEnum):
    """OK: an orderly end. FAILED: something broke while serving. UNUSABLE: it could not start as asked."""

    OK = 0
    FAILED = 1
    UNUSABLE = 2


def bind_life_to_parent() -> None:
    """Ignore the signals that the supervisor handles for all, and die with it, however it dies."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is None or os.getppid() != parent.pid:  # it died before prctl took effect
        os._exit(ExitCode.FAILED)
