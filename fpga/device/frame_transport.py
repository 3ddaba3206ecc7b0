"""Carries frames between a host and a device, as datagrams or over a serial line.

udp://HOST:PORT                  one frame per datagram
serial:/dev/ttyUSB0[?baud=N]     frames on a raw 8N1 line, 3,000,000 baud by default
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import termios
import tty
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Protocol, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from fpga.device.framing import MAX_FRAME, DeviceFrame, FrameDecoder, decode, session_of
from hawkvision.core.errors import BackendError, ConfigError

DEFAULT_BAUD: Final = 3_000_000
"""Common USB bridges (FT2232H, CH347) and a small UART in logic support it; 300 KB/s."""
SEND_TIMEOUT_S: Final = 2.0
"""A line that accepts nothing for this long is broken; a frame takes 4 ms at the default baud."""
READS: Final = 64
"""Datagrams, or reads of a line, per call of `receive`."""
MAX_HOSTS: Final = 64
"""Hosts whose addresses a device remembers; it serves one session at a time."""
RECEIVE_BUFFER: Final = 1 << 20
"""Bytes of datagrams that the kernel buffers: several full windows."""


class DeviceLink(Protocol):
    """A link to a peer; receiving never blocks."""

    def fileno(self) -> int:
        """Descriptor that becomes readable when data has arrived."""
        ...

    def send(self, frame: bytes) -> None:
        """Send a frame, or lose it.

        Raises:
            BackendError: if the link is broken.
        """
        ...

    def receive(self) -> list[DeviceFrame]:
        """The frames that have arrived, from at most `READS` reads.

        Raises:
            BackendError: if the link is broken.
        """
        ...

    def close(self) -> None:
        """Close the link."""
        ...


Address: TypeAlias = tuple[str, int]


class UdpLink:
    """Datagrams: to one peer if the socket is connected, else to the host of each session."""

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
        """See `DeviceLink`."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """See `DeviceLink`. A full buffer, or a peer that does not listen yet, loses the frame.

        A device ignores hosts that cannot be reached, because it has others.
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
        """See `DeviceLink`."""
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
        """See `DeviceLink`."""
        self._socket.close()


class SerialLink:
    """Frames in a byte stream: a tty, or one end of a pseudo-terminal."""

    def __init__(self, descriptor: int, where: str) -> None:
        self._descriptor, self._where, self._decoder = descriptor, where, FrameDecoder()
        os.set_blocking(descriptor, False)

    @classmethod
    def to(cls, path: str, baud: int = DEFAULT_BAUD) -> SerialLink:
        """A tty, set to raw 8N1 at this speed.

        Raises:
            BackendError: if it does not exist, is in use, or does not support the speed.
        """
        speed = getattr(termios, f"B{baud}", None)
        if not speed:  # 0 would hang up
            raise BackendError(f"serial:{path}: {baud} baud is no speed that this system knows")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError as error:
            raise BackendError(f"serial:{path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            tty.setraw(descriptor)
            mode = termios.tcgetattr(descriptor)
            # There is no modem at the other end. setraw leaves these flags as an earlier user set them.
            mode[2] |= termios.CLOCAL | termios.CREAD
            mode[2] &= ~(termios.CSTOPB | termios.CRTSCTS)
            mode[4] = mode[5] = speed
            termios.tcsetattr(descriptor, termios.TCSANOW, mode)
            termios.tcflush(descriptor, termios.TCIOFLUSH)
        except BlockingIOError:
            os.close(descriptor)
            raise BackendError(f"serial:{path}: another has it") from None
        except termios.error as error:
            os.close(descriptor)
            raise BackendError(f"serial:{path}: {error.args[-1]}") from None
        return cls(descriptor, f"serial:{path}")

    def fileno(self) -> int:
        """See `DeviceLink`."""
        return self._descriptor

    def send(self, frame: bytes) -> None:
        """See `DeviceLink`. Waits while the line is full, `SEND_TIMEOUT_S` at most."""
        left, writable = memoryview(frame), select.poll()  # not select, which takes descriptors below 1,024 only
        writable.register(self._descriptor, select.POLLOUT)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                if not writable.poll(SEND_TIMEOUT_S * 1e3):
                    raise BackendError(f"{self._where}: it takes nothing") from None
            except OSError as error:
                raise BackendError(f"{self._where}: {error.strerror}") from None

    def receive(self) -> list[DeviceFrame]:
        """See `DeviceLink`."""
        return [frame for piece in self._pieces() for frame in self._decoder.feed(piece)]

    def close(self) -> None:
        """See `DeviceLink`."""
        os.close(self._descriptor)

    def _pieces(self) -> Iterator[bytes]:
        for _ in range(READS):
            try:
                piece = os.read(self._descriptor, 65536)
            except BlockingIOError:
                return
            except OSError as error:
                raise BackendError(f"{self._where}: {error.strerror}") from None
            if not piece:
                raise BackendError(f"{self._where}: the line has been hung up")
            yield piece


def open_link(url: str) -> DeviceLink:
    """Open the link to a device at `udp://HOST:PORT` or `serial:PATH[?baud=N]`.

    Raises:
        ConfigError: if the address is neither.
        BackendError: if the link cannot be opened.
    """
    expected = f"fpga_device: expected udp://HOST:PORT or serial:/dev/NAME[?baud=N], got {url!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        baud = int(query.pop("baud", DEFAULT_BAUD))
    except ValueError:  # the port or baud is no number
        raise ConfigError(expected) from None
    if parts.scheme == "udp" and parts.hostname and port and not (parts.path or parts.query):
        return UdpLink.to(parts.hostname, port)
    if parts.scheme == "serial" and parts.path.startswith("/") and "\0" not in url and not parts.netloc and not query:
        return SerialLink.to(parts.path, baud)
    raise ConfigError(expected)
