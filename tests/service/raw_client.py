"""RawClient: one gRPC call over plain HTTP/2 frames, for what a real client never does.

It can stop reading, send metadata that libraries keep for themselves, and tell trailers from headers.
"""

import base64
import socket
import struct
import time
from types import TracebackType

import h2.config
import h2.connection
import h2.events
import h2.settings
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status


class RawClient:
    """``window``: bytes of response data that the server may send before we say that we read them."""

    def __init__(self, address: str, window: int = 65_535) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(config)
        self._h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self._h2.initiate_connection()
        self._flush()
        self.header_frames: list[dict[str, str]] = []
        self.data = b""
        self.ended = False
        self.reset = False

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def call(self, path: str, request: Message, *metadata: tuple[str, str]) -> None:
        """Sends the whole request."""
        stream = self._h2.get_next_available_stream_id()
        headers = [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"),
            ("content-type", "application/grpc"), ("te", "trailers"), *metadata,
        ]
        self._h2.send_headers(stream, headers)
        body = request.SerializeToString()
        self._h2.send_data(stream, struct.pack(">BI", 0, len(body)) + body, end_stream=True)
        self._stream = stream
        self._flush()

    def read(self, seconds: float, *, acknowledge: bool = True) -> None:
        """Handles frames for a time or until the stream ends; without ``acknowledge`` the window is not opened."""
        end = time.monotonic() + seconds
        while not (self.ended or self.reset) and (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                received = self._socket.recv(65_536)
            except TimeoutError:
                return
            if not received:
                self.reset = True
                return
            for event in self._h2.receive_data(received):
                self._on_event(event, acknowledge)
            self._flush()

    def open_window(self, amount: int = 1 << 24) -> None:
        """Reads again: everything held back may come."""
        self._h2.increment_flow_control_window(amount, stream_id=self._stream)
        self._h2.increment_flow_control_window(amount)
        self._flush()

    @property
    def trailers(self) -> dict[str, str]:
        return self.header_frames[-1]

    def details(self) -> Status:
        raw = self.trailers["grpc-status-details-bin"]
        status = Status()
        status.ParseFromString(base64.b64decode(raw + "=" * (-len(raw) % 4)))
        return status

    def _on_event(self, event: h2.events.Event, acknowledge: bool) -> None:
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            self.header_frames.append({str(name): str(value) for name, value in event.headers or ()})
        elif isinstance(event, h2.events.DataReceived):
            self.data += event.data or b""
            if acknowledge and event.flow_controlled_length:
                self._h2.acknowledge_received_data(event.flow_controlled_length, self._stream)
        elif isinstance(event, h2.events.StreamEnded):
            self.ended = True
        elif isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
            self.reset = True

    def _flush(self) -> None:
        self._socket.sendall(self._h2.data_to_send())
