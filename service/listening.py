"""Where a server listens: addresses, ports that several fronts share, and what is refused."""

import socket

import grpc

from engine.errors import ConfigError


def bind(server: grpc.aio.Server, option: str, address: str) -> str:
    """The address in use, with its port. Raises `ConfigError`."""
    try:
        port = 0 if _answers(address) else server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise _unusable(option, address)
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


class PortClaim:
    """Takes a TCP port for the fronts of this instance: refused when anybody listens there, willing to share or not.

    Only then do the fronts bind it, each with SO_REUSEPORT, which alone would let them join a stranger. Nothing listens
    on the claim itself; `close` it once all fronts do. Raises `ConfigError`.
    """

    def __init__(self, option: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._sockets: list[socket.socket] = []
        self._port = int(port)
        try:
            for family, _, _, _, where in socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                self._claim(family, where[0], where[2:])
        except OSError as error:
            self.close()
            raise _unusable(option, address) from error
        if not self._sockets:
            raise _unusable(option, address)
        self.address = f"{host}:{self._port}"

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets = []

    def _claim(self, family: int, host: str | int, more: tuple[str | int, ...]) -> None:
        """Alone first, over connections that linger from before; then open to who shares, except to another claim."""
        try:
            sock = socket.socket(family)
        except OSError:  # a family that this machine does not have
            return
        self._sockets.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind((host, self._port, *more))
        self._port = sock.getsockname()[1]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _unusable(option: str, address: str) -> ConfigError:
    return ConfigError(f"{option} {address}: cannot listen there; is the address in use?")


def _answers(address: str) -> bool:
    """Whether somebody listens on this unix socket: gRPC would take it away from them. One left behind is replaced."""
    if not address.startswith("unix:"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("unix:"))
        except OSError:
            return False
    return True
