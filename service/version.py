"""The server's version, as installed."""

from importlib.metadata import PackageNotFoundError, version


def server_version() -> str:
    """A checkout that was never installed has no version of its own."""
    try:
        return version("picovllm")
    except PackageNotFoundError:
        return "checkout"
