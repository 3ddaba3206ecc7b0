"""A device on a line: it keeps the contract, and no caller, other device or broken line takes it from the others."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fpga.backends.device import DeviceBackend
from fpga.device.device_session import DeviceSession
from fpga.device.frame_transport import UdpLink, open_link
from fpga.device.framing import DeviceFrame, DeviceWelcome, HostHello, ImageTrouble, RefusalReason, encode
from fpga.device.host_session import MAX_ATTEMPTS
from hawkvision.core.errors import BackendError, BackendUnavailable, ConfigError
from hawkvision.core.types import LOGITS
from hawkvision.inference.backends.interface import Backend
from tests.fpga.small_model import GRAPH, emulated, images
from tests.hawkvision.inference.backend_conformance import BackendConformance
from tests.hawkvision.integer.graphs import random_graph


@contextlib.contextmanager
def not_emulated(window: int = 2) -> Iterator[int]:
    """The port of a device that does not say that it is a program; its logits are all 0."""
    at, link, stop = GRAPH.input, UdpLink.at("127.0.0.1", 0), threading.Event()
    session = DeviceSession(GRAPH, DeviceWelcome(at.height, at.width, at.channels, GRAPH.classes, window, False, 0, 7))

    def answer() -> None:
        while not stop.is_set():
            select.select((link,), (), (), 0.05)
            for frame in link.receive():
                replies, work = session.receive(frame)
                done = None if work is None else session.finish(work, 7, np.zeros(GRAPH.classes, np.int32))
                for reply in [*replies, *([] if done is None else [done])]:
                    link.send(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield link.port
    finally:
        stop.set()
        thread.join()
        link.close()


class TestDeviceBackend(BackendConformance):
    # A device has one session: the newer host takes it from the older, which greets it again for its next image.
    @pytest.fixture
    def make_backend(self, udp: str) -> Callable[[], Backend]:
        return lambda: DeviceBackend(GRAPH, udp)


def test_the_device_tells_what_it_models_from_what_was_measured(udp: str) -> None:
    with contextlib.closing(DeviceBackend(GRAPH, udp)) as backend:
        backend.infer(images(2))
        counts = backend.counts()
    # The emulator was told of no folding: a multiplication a cycle.
    assert counts.cycles == {"modelled": 2 * GRAPH.multiplications}
    assert counts.seconds["modelled"] == pytest.approx(2 * GRAPH.multiplications / 100e6)
    assert counts.seconds["round_trip"] >= counts.seconds["modelled"]
    assert counts.emulated is True


def test_a_round_trip_begins_when_an_image_is_sent_not_when_it_gets_in_line(model: Path) -> None:
    # So slow a clock that a stalled machine does not pass for a line of images.
    with (
        emulated(model, "--window", "1", "--clock-mhz", "0.1") as process,
        contextlib.closing(DeviceBackend(GRAPH, process.url)) as backend,
    ):
        backend.infer(images(1))
        before = backend.counts().seconds
        backend.infer(images(8))
        after = backend.counts().seconds
    took, worked = (after[kind] - before[kind] for kind in ("round_trip", "modelled"))
    assert took < 3 * worked, "eight in line would make (1 + 2 + … + 8) / 8 of it"


def test_a_device_that_takes_anothers_place_is_called_what_it_is(model: Path) -> None:
    with contextlib.ExitStack() as stack:
        with not_emulated() as port:
            backend = stack.enter_context(contextlib.closing(DeviceBackend(GRAPH, f"udp://127.0.0.1:{port}")))
            backend.infer(images(1))
        assert backend.counts().emulated is False
        assert set(backend.counts().cycles) == {"reported"}
        with emulated(model, "--port", str(port)):
            backend.infer(images(1))
            assert backend.counts().emulated is True
            assert set(backend.counts().cycles) == {"reported", "modelled"}


def test_images_beyond_those_that_may_wait_are_turned_away_and_leave_the_device_to_others() -> None:
    with (
        not_emulated(window=1) as port,
        contextlib.closing(DeviceBackend(GRAPH, f"udp://127.0.0.1:{port}", max_waiting=1)) as backend,
    ):
        with pytest.raises(BackendUnavailable, match="1 images are waiting for the device"):
            backend.infer(images(50))
        for _ in range(1000):  # until the connection's thread has dropped them
            with contextlib.suppress(BackendUnavailable):
                assert backend.infer(images(1))[LOGITS].shape == (1, 5)
                return
            time.sleep(0.01)
        pytest.fail("their places were never free again")


def test_a_device_of_another_model_is_an_error_at_the_start(udp: str) -> None:
    with pytest.raises(BackendError, match=f"holds the model {GRAPH.sha256[:16]}"):
        DeviceBackend(random_graph(9), udp)


def test_a_line_is_opened_anew_however_many_connections_are_open(udp: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    with contextlib.ExitStack() as connections:
        connections.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (opened := os.dup(0)) < 1024:
            connections.callback(os.close, opened)
        connections.callback(os.close, opened)
        with contextlib.closing(DeviceBackend(GRAPH, udp)) as backend:
            assert backend.infer(images(1))[LOGITS].shape == (1, 5)


def test_a_line_without_a_descriptor_left_is_an_error_of_the_backend(udp: str) -> None:
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 2, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        os.close(taken.pop())  # one is enough for the socket, not for what wakes its thread
        with pytest.raises(BackendError, match=f"{udp}: Too many open files"):
            DeviceBackend(GRAPH, udp)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


def test_a_device_that_falls_silent_is_unavailable_not_a_defect(model: Path) -> None:
    with emulated(model) as process:
        backend = DeviceBackend(GRAPH, process.url, attempts=1)
    with contextlib.closing(backend), pytest.raises(BackendUnavailable, match="no answer after 1 attempts"):
        backend.infer(images(1))


def test_a_backend_that_is_given_up_waits_for_no_device() -> None:
    given_up: Future[None] = Future()
    with contextlib.closing(UdpLink.at("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        opening = pool.submit(DeviceBackend, GRAPH, f"udp://127.0.0.1:{silent.port}", given_up=given_up)
        assert select.select((silent,), (), (), 10)[0]
        given_up.set_result(None)
        with pytest.raises(BackendUnavailable, match="the backend is closed"):
            opening.result()
        assert len(silent.receive()) < MAX_ATTEMPTS


def test_closing_ends_the_thread(udp: str) -> None:
    DeviceBackend(GRAPH, udp).close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hawkvision-fpga-device"]


NO_ADDRESSES = "udp://host udp://h:99999 udp://h:1/x udp://h:1?x=1 serial:/dev/tty"


@pytest.mark.parametrize("url", ["", *NO_ADDRESSES.split(" ")])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected udp://HOST:PORT"):
        open_link(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("udp://no-such-host.invalid:1", "udp://no-such-host.invalid:1"),
        (f"udp://{'a' * 64}.net:1", "udp://a+.net:1: .*label"),
    ],
)
def test_lines_that_cannot_be_opened_are_errors(url: str, says: str) -> None:
    with pytest.raises(BackendError, match=says):
        open_link(url)


def test_a_device_answers_the_host_whose_session_it_is_not_the_last_to_speak() -> None:
    device = UdpLink.at("127.0.0.1", 0)
    hosts = [UdpLink.to("127.0.0.1", device.port) for _ in range(2)]
    for session, host in enumerate(hosts):
        host.send(encode(DeviceFrame(session, 0, HostHello(bytes(32)))))
    found: list[DeviceFrame] = []
    while len(found) < 2:
        found += device.receive()
    device.send(encode(DeviceFrame(0, 1, ImageTrouble(RefusalReason.FAILED, "for the first"))))
    device.send(encode(DeviceFrame(1, 1, ImageTrouble(RefusalReason.FAILED, "for the second"))))
    for session, host in enumerate(hosts):
        assert select.select((host,), (), (), 10)[0]
        assert [frame.session for frame in host.receive()] == [session]
    for link in (device, *hosts):
        link.close()
