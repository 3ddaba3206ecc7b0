"""Carries frames between a host and a device: one frame per datagram."""

from __future__ import annotations

import contextlib
import socket
from collections import OrderedDict
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from fpga.device.framing import MAX_FRAME, DeviceFrame, decode, session_of
from hawkvision.core.errors import BackendError, ConfigError

READS: Final = 64
"""Datagrams per call of `receive`."""
MAX_HOSTS: Final = 64
"""Hosts whose addresses a device remembers; it serves one session at a time."""
RECEIVE_BUFFER: Final = 1 << 20
"""Bytes of datagrams that the kernel buffers: several full windows."""


Address: TypeAlias = tuple[str, int]


class UdpLink:
    """Datagrams: to one peer if the socket is connected, else to the host of each session. Receiving never blocks."""

    def __init__(self, udp: socket.socket, connected: bool) -> None:
        self._socket, self._connected = udp, connected
        self._hosts: OrderedDict[int, Address] = OrderedDict()
        """By session, in the order of their last frames."""
        udp.setblocking(False)
        with contextlib.suppress(OSError):
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)

    @classmethod
    def to(cls, host: str, port: int) -> UdpLink:
        """A host's link to a device.

        Raises:
            BackendError: if the name does not resolve.
        """
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            udp = socket.socket(family, kind)
            udp.connect(address)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that is no DNS label
            raise BackendError(f"udp://{host}:{port}: {error}") from None
        return cls(udp, connected=True)

    @classmethod
    def at(cls, host: str, port: int) -> UdpLink:
        """A device's link, which waits for hosts.

        Raises:
            BackendError: if the port is taken.
        """
        udp = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            udp.bind((host, port))
        except OSError as error:
            udp.close()
            raise BackendError(f"udp://{host}:{port}: {error}") from None
        return cls(udp, connected=False)

    @property
    def port(self) -> int:
        """The local port."""
        return int(self._socket.getsockname()[1])

    def fileno(self) -> int:
        """Descriptor that becomes readable when data has arrived."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame; a full buffer, or a peer that does not listen yet, loses it.

        A device ignores hosts that cannot be reached, because it has others.

        Raises:
            BackendError: if the link is broken.
        """
        try:
            if self._connected:
                self._socket.send(frame)
            elif (host := self._hosts.get(session_of(frame))) is not None:
                self._socket.sendto(frame, host)
        except (BlockingIOError, ConnectionRefusedError):
            return
        except OSError as error:
            if self._connected:
                raise BackendError(f"udp: {error}") from None

    def receive(self) -> list[DeviceFrame]:
        """The frames that have arrived, from at most `READS` datagrams.

        Raises:
            BackendError: if the link is broken.
        """
        frames = []
        for _ in range(READS):
            try:
                data, peer = self._socket.recvfrom(MAX_FRAME + 1)
            except BlockingIOError:
                break
            except ConnectionRefusedError:  # caused by an earlier datagram
                continue
            except OSError as error:
                raise BackendError(f"udp: {error}") from None
            if (frame := decode(data)) is not None:
                frames.append(frame)
                if not self._connected:
                    self._hosts[frame.session] = peer
                    self._hosts.move_to_end(frame.session)
                    if len(self._hosts) > MAX_HOSTS:
                        self._hosts.popitem(last=False)
        return frames

    def close(self) -> None:
        """Close the link."""
        self._socket.close()


def open_link(url: str) -> UdpLink:
    """Open the link to a device at `udp://HOST:PORT`.

    Raises:
        ConfigError: if that is no such address.
        BackendError: if the link cannot be opened.
    """
    expected = f"fpga_device: expected udp://HOST:PORT, got {url!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # the port is no number
        raise ConfigError(expected) from None
    if parts.scheme == "udp" and parts.hostname and port and not (parts.path or parts.query):
        return UdpLink.to(parts.hostname, port)
    raise ConfigError(expected)
