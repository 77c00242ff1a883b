"""Servers for tests: one with the fake engine per module, and a factory for those with options of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.server_process import ServerProcess

FAKE = "tests.service.fake_server"
StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def fake_server(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[ServerProcess]:
    """Shared by the tests of a module: leave it as it was."""
    server = ServerProcess(tmp_path_factory.mktemp("fake"), "--model", str(tiny_dir), module=FAKE)
    yield server
    server.close()


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[ServerProcess]:
    """The real engine on the tiny model; shared like `fake_server`."""
    options = ("--model", str(tiny_dir), "--num-gpu-blocks", "2048", "--lame-duck", "0")
    server = ServerProcess(tmp_path_factory.mktemp("tiny"), *options)
    yield server
    server.close()


@pytest.fixture
def start_fake(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[StartServer]:
    """Starts servers with the fake engine: ``start_fake("--max-num-seqs", "1")``."""
    yield from _starter(tmp_path_factory, "--model", str(tiny_dir), module=FAKE)


@pytest.fixture
def start_tiny(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[StartServer]:
    """Starts servers with the real engine on the tiny model."""
    yield from _starter(tmp_path_factory, "--model", str(tiny_dir), module="service")


def _starter(factory: pytest.TempPathFactory, *common: str, module: str) -> Iterator[StartServer]:
    servers: list[ServerProcess] = []

    def start(*options: str, wait: bool = True) -> ServerProcess:
        server = ServerProcess(factory.mktemp("server"), *common, *options, module=module, wait=wait)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()
