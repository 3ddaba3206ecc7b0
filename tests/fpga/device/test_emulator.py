"""A host and an emulated device over a line that loses, repeats, delays and changes frames: right logits, or an error.

All of it in simulated time, from a seed; the process itself is in `test_backends`.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpga.device.device_session import DeviceSession, IncomingImage
from fpga.device.emulator import Emulator, main
from fpga.device.framing import (
    SPAN,
    DeviceFrame,
    DeviceRefusal,
    DeviceWelcome,
    ImageTrouble,
    LogitsReply,
    PixelRun,
    RefusalReason,
    decode,
)
from fpga.device.host_session import (
    FIRST_TIMEOUT_S,
    MAX_ATTEMPTS,
    MAX_PAUSE_S,
    HostEvent,
    HostSession,
    ImageFailed,
    SessionRefused,
)
from fpga.simulation.integer_kernel import IntegerKernel
from hawkvision.core.errors import BackendError
from hawkvision.integer import reference
from tests.fuzz.examples import examples
from tests.hawkvision.integer.graphs import random_graph, random_images

GRAPH = random_graph(side=24, planes=3, classes=5)
"""An image takes two frames."""
CYCLES, CLOCK_HZ = 1000, 1_000_000


NO_ANSWER = f"no answer after {MAX_ATTEMPTS} attempts"


@cache
def kernel() -> IntegerKernel:
    return IntegerKernel(GRAPH)


def emulator(window: int = 4, cycles: int = CYCLES) -> Emulator:
    return Emulator(GRAPH, kernel(), cycles, CLOCK_HZ, window)


@dataclass
class Line:
    """Two ends and what is on its way between them, in simulated time."""

    seed: int = 0
    loss: float = 0.0
    repeated: float = 0.0
    changed: float = 0.0
    jitter_s: float = 0.0
    window: int = 4
    cycles: int = CYCLES
    host: HostSession = field(init=False)
    device: Emulator = field(init=False)
    now: float = 0.0
    events: list[HostEvent] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.host, self.device = HostSession(GRAPH, 77), emulator(self.window, self.cycles)
        self.flying: list[tuple[float, int, bool, bytes]] = []

    def carry(self, frames: list[bytes], to_device: bool) -> None:
        for data in frames:
            for _ in range(1 + (self.draw.random() < self.repeated)):
                self.sent += 1
                content = bytearray(data)
                if self.draw.random() < self.changed:
                    content[self.draw.randrange(len(content))] ^= self.draw.randint(1, 255)
                if self.draw.random() >= self.loss:
                    arrival = self.now + 1e-4 + self.draw.random() * self.jitter_s
                    heapq.heappush(self.flying, (arrival, self.sent, to_device, bytes(content)))

    def step(self) -> bool:
        """To the next moment at which something happens; False if nothing will."""
        self.carry(self.host.take(), True)
        times = [self.host.wake_at, self.device.wake_at, self.flying[0][0] if self.flying else None]
        if all(time is None for time in times):
            return False
        self.now = max(self.now, min(time for time in times if time is not None))
        while self.flying and self.flying[0][0] <= self.now:
            _, _, to_device, data = heapq.heappop(self.flying)
            frame = decode(data)
            if frame is not None and to_device:
                self.carry(self.device.receive(frame, self.now), False)
            elif frame is not None:
                self.events += self.host.receive(frame, self.now)
        self.carry(self.device.advance(self.now), False)
        self.events += self.host.advance(self.now)
        return True

    def classify(self, images: np.ndarray) -> list[int]:
        """Send all of them as places fall free; the sequence numbers."""
        rows, sequences = images.reshape(len(images), -1, 3), []
        for image in rows:
            while not self.host.room:
                assert self.step()
            sequences.append(self.host.begin(image, self.now))
        while self.step():
            pass
        return sequences

    def answers(self) -> dict[int, list[int]]:
        replies = self.replies()
        assert len({sequence for sequence, _ in replies}) == len(replies), "answered twice"
        return {sequence: reply.logits.tolist() for sequence, reply in replies}

    def replies(self) -> list[tuple[int, LogitsReply]]:
        frames = [event for event in self.events if isinstance(event, DeviceFrame)]
        return [(frame.sequence, frame.message) for frame in frames if isinstance(frame.message, LogitsReply)]


def greeted(window: int = 2, session: int = 1, clock_hz: int = 1, cycles: int = 1) -> HostSession:
    """A host whose session is open."""
    host = HostSession(GRAPH, session)
    host.open(0.0)
    host.receive(DeviceFrame(session, 0, DeviceWelcome(24, 24, 3, 5, window, True, clock_hz, cycles)), 0.0)
    return host


IMAGE = random_images(GRAPH, 1).reshape(-1, 3)


def expected(images: np.ndarray) -> list[list[int]]:
    return reference.logits(GRAPH, images).tolist()  # type: ignore[no-any-return]


def test_images_are_answered_with_the_reference_logits_and_cycles() -> None:
    line, images = Line(), random_images(GRAPH, 9)
    sequences = line.classify(images)
    assert [line.answers()[each] for each in sequences] == expected(images)
    assert {reply.cycles for _, reply in line.replies()} == {CYCLES}
    assert isinstance(line.events[0], DeviceWelcome)
    assert line.events[0].emulated
    assert line.host.repeated == 0


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 1 << 32),
    loss=st.floats(0, 0.15),
    repeated=st.floats(0, 0.3),
    changed=st.floats(0, 0.1),
    jitter_s=st.floats(0, 0.4),
    window=st.integers(1, 8),
)
def test_a_bad_line_costs_time_and_never_an_answer(
    seed: int, loss: float, repeated: float, changed: float, jitter_s: float, window: int
) -> None:
    line = Line(seed, loss, repeated, changed, jitter_s, window)
    images = random_images(GRAPH, 6, seed)
    sequences, right = line.classify(images), expected(images)
    answers = line.answers()
    failed = {event.sequence for event in line.events if isinstance(event, ImageFailed)}
    assert failed | set(answers) == set(sequences)
    assert all(answers[each] == right[index] for index, each in enumerate(sequences) if each in answers)


def test_moderate_loss_loses_no_image() -> None:
    line, images = Line(seed=5, loss=0.05, repeated=0.05), random_images(GRAPH, 100)
    assert len(line.answers() if (line.classify(images)) else ()) == 100
    assert 0 < line.host.repeated < 40


def test_a_dead_line_fails_after_a_bounded_time() -> None:
    line = Line(loss=1.0)
    (sequence,) = line.classify(random_images(GRAPH, 1))
    assert line.events == [
        SessionRefused(f"no device answers {MAX_ATTEMPTS} greetings"),
        ImageFailed(sequence, f"no device answers {MAX_ATTEMPTS} greetings"),
    ]
    assert line.now == pytest.approx(FIRST_TIMEOUT_S * (2**MAX_ATTEMPTS - 1))
    assert line.sent == MAX_ATTEMPTS


def test_a_line_that_dies_later_fails_its_images() -> None:
    line = Line()
    line.classify(random_images(GRAPH, 1))
    line.loss = 1.0
    (sequence,) = line.classify(random_images(GRAPH, 1))
    assert line.events[-2:] == [SessionRefused(NO_ANSWER), ImageFailed(sequence, NO_ANSWER)]
    line.loss = 0.0
    (sequence,) = line.classify(random_images(GRAPH, 1))
    assert sequence in line.answers()


def test_images_that_get_no_answer_take_the_others_with_them_unless_these_get_some() -> None:
    line = Line()
    line.classify(random_images(GRAPH, 1))
    line.loss = 1.0
    first, second = (line.host.begin(random_images(GRAPH, 1).reshape(-1, 3), line.now + delay) for delay in (0.0, 5.0))
    begun = line.now
    while line.step():
        pass
    assert {event.sequence for event in line.events if isinstance(event, ImageFailed)} == {first, second}
    assert line.now - begun == pytest.approx(FIRST_TIMEOUT_S * (2**MAX_ATTEMPTS - 1))


def test_one_image_without_an_answer_fails_alone_while_others_get_theirs() -> None:
    host = greeted(window=4, cycles=0)
    lost, events, now = host.begin(IMAGE, 0.0), list[HostEvent](), 0.0
    while not events:
        now += 0.3
        other = host.begin(IMAGE, now)
        assert host.receive(DeviceFrame(1, other, LogitsReply(0, np.zeros(5, np.int32))), now)
        events += host.advance(now)
    assert events == [ImageFailed(lost, NO_ANSWER)]
    assert host.room


def test_a_slow_device_is_given_the_time_of_its_window_before_an_image_is_repeated() -> None:
    line, images = Line(window=8, cycles=CLOCK_HZ // 10), random_images(GRAPH, 20)
    assert len(line.answers() if line.classify(images) else ()) == 20
    assert line.host.repeated == 0


def test_a_device_that_calls_itself_endlessly_slow_is_given_up_after_a_bounded_time() -> None:
    host, events, now = greeted(window=63, cycles=(1 << 32) - 1), list[HostEvent](), 0.0
    host.begin(IMAGE, now)
    while not events:
        assert host.wake_at is not None
        now = host.wake_at
        events += host.advance(now)
    assert events[0] == SessionRefused(NO_ANSWER)
    assert now == MAX_ATTEMPTS * MAX_PAUSE_S


def test_a_device_that_was_switched_off_and_on_is_greeted_again() -> None:
    line = Line()
    line.classify(random_images(GRAPH, 3))
    line.device = emulator()
    images = random_images(GRAPH, 3, 1)
    sequences = line.classify(images)
    assert [line.answers()[each] for each in sequences] == expected(images)


def test_a_device_that_forgets_every_session_fails_the_image_after_a_bounded_number_of_greetings() -> None:
    host, welcome = HostSession(GRAPH, 1), DeviceWelcome(24, 24, 3, 5, 2, True, 1, 1)
    whole = host.begin(IMAGE, 0.0)
    events, frames = list[HostEvent](), 0
    while sent := host.take():
        frames += len(sent)
        assert frames < 100
        for frame in map(decode, sent):
            assert frame is not None
            forgot = DeviceFrame(1, frame.sequence, ImageTrouble(RefusalReason.SESSION, "who are you?"))
            events += host.receive(forgot if isinstance(frame.message, PixelRun) else DeviceFrame(1, 0, welcome), 0.0)
    assert events[-1] == ImageFailed(whole, NO_ANSWER)
    assert host.room


def test_the_emulator_answers_after_the_modelled_time_one_at_a_time() -> None:
    line = Line(window=3)
    line.classify(random_images(GRAPH, 1))
    before = line.now
    line.classify(random_images(GRAPH, 3))
    assert line.now - before == pytest.approx(3 * CYCLES / CLOCK_HZ + 2e-4)


def test_hosts_that_come_and_go_leave_no_work_behind_but_the_one_begun() -> None:
    device = emulator(window=2)
    for session in range(1, 10):
        host = greeted(session=session)
        for _ in range(2):
            host.begin(IMAGE, 0.0)
        for frame in map(decode, host.take()):
            assert frame is not None
            device.receive(frame, 0.0)
    service_s = CYCLES / CLOCK_HZ
    assert len(device.advance(2.5 * service_s)) == 1, "the first was begun for the first host"
    assert len(device.advance(3.5 * service_s)) == 1
    assert device.wake_at is None


@pytest.mark.parametrize("clock", ["0", "-1", "nan", "inf", "1e-9", "5000", "fast"])
def test_a_clock_that_is_none_is_refused(clock: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "x", f"--clock-mhz={clock}"])
    assert "argument --clock-mhz: " in capsys.readouterr().err


def test_an_emulator_that_no_greeting_could_describe_is_refused() -> None:
    with pytest.raises(BackendError, match="Welcome"):
        Emulator(GRAPH, kernel(), CYCLES, 1 << 32)


def device() -> DeviceSession:
    session = DeviceSession(GRAPH, DeviceWelcome(24, 24, 3, 5, 2, True, CLOCK_HZ, CYCLES))
    greeting = HostSession(GRAPH, 1)
    greeting.open(0.0)
    for data in greeting.take():
        frame = decode(data)
        assert frame is not None
        session.receive(frame)
    return session


def whole(sequence: int, behind: int = 0) -> list[DeviceFrame]:
    pixels = random_images(GRAPH, 1, sequence).reshape(-1, 3)
    return [DeviceFrame(1, sequence, PixelRun(start, pixels[start : start + 288], behind)) for start in (0, 288)]


def troubles(replies: list[bytes]) -> list[int]:
    frames = [decode(data) for data in replies]
    return [frame.message.reason for frame in frames if frame and isinstance(frame.message, ImageTrouble)]


def test_the_device_queue_is_bounded() -> None:
    session = device()
    for sequence in (1, 2):
        session.receive(whole(sequence, behind=sequence - 1)[0])
    assert troubles(session.receive(whole(3, behind=2)[0])[0]) == [RefusalReason.BUSY]
    # What the host no longer waits for makes room.
    assert session.receive(whole(3, behind=0)[0]) == ([], None)


def test_the_device_computes_an_image_once_and_answers_again() -> None:
    session, (first, second) = device(), whole(1)
    session.receive(second)
    work = session.receive(first)[1]
    assert isinstance(work, IncomingImage)
    assert session.receive(first) == ([], None)
    answer = session.finish(work, CYCLES, np.arange(5, dtype=np.int32))
    assert answer is not None
    assert session.receive(second) == ([answer], None)
    assert session.finish(work, CYCLES, np.arange(5, dtype=np.int32)) is None


def test_the_device_keeps_a_bounded_number_of_answers() -> None:
    session = device()
    for sequence in range(1, SPAN + 3):
        works = [session.receive(frame)[1] for frame in whole(sequence)]
        assert works[1] is not None
        session.finish(works[1], 0, np.zeros(5, np.int32))
    assert session.receive(whole(2, behind=0)[0]) == ([], None)
    assert len(session.receive(whole(3)[0])[0]) == 1


def test_the_device_refuses_pixels_that_are_none_of_the_image() -> None:
    session = device()
    for run in (PixelRun(500, np.zeros((100, 3), np.uint8)), PixelRun(0, np.zeros((10, 1), np.uint8))):
        assert troubles(session.receive(DeviceFrame(1, 1, run))[0]) == [RefusalReason.MALFORMED]


def test_what_a_device_says_stays_on_a_line_of_the_log() -> None:
    host, said = greeted(), "hot\nERROR forged \x1b[2J"
    sequence = host.begin(IMAGE, 0.0)
    events = host.receive(DeviceFrame(1, sequence, ImageTrouble(RefusalReason.FAILED, said)), 0.0)
    assert events == [ImageFailed(sequence, r"the device says: 'hot\nERROR forged \x1b[2J'", for_now=False)]
    (refused,) = host.receive(DeviceFrame(1, 0, DeviceRefusal(RefusalReason.VERSION, bytes(32), said)), 0.0)
    assert refused == SessionRefused(r"the device refuses: 'hot\nERROR forged \x1b[2J'")


def test_the_host_ignores_what_is_not_for_it() -> None:
    host = greeted()
    assert host.receive(DeviceFrame(2, 0, LogitsReply(0, np.zeros(5, np.int32))), 0.0) == []
    assert host.receive(DeviceFrame(1, 9, ImageTrouble(RefusalReason.FAILED, "?")), 0.0) == []
    (refused,) = HostSession(GRAPH, 2).receive(DeviceFrame(2, 0, DeviceWelcome(24, 24, 3, 5, 0, True, 1, 1)), 0.0)
    assert isinstance(refused, SessionRefused), "a window of none"
