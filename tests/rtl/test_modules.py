"""Each module of `fpga/rtl` against what the head of its file says, with pauses at random."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from hawkvision.integer import reference
from hawkvision.integer.ir import Requantise
from tests.rtl.bench import Bench, fields, joined, signed

RANDOM = np.random.default_rng(2)
BIAS = RANDOM.integers(-9000, 9000, 8).tolist()
MULTIPLIER = RANDOM.integers(1, 512, 8).tolist()
WORD = 16 + 9


def constants(lanes: int) -> bytes:
    words = [(bias & 0xFFFF) << 9 | multiplier for bias, multiplier in zip(BIAS, MULTIPLIER, strict=True)]
    lines = [f"{joined(words[i : i + lanes], WORD):x}\n" for i in range(0, 8, lanes)]
    return "".join(lines).encode()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench({"CONSTANTS": ("constants.mem", constants(2)), "BIASES": ("biases.mem", constants(1))})
    yield made
    made.close()


@pytest.mark.parametrize(("write", "read"), [(0.9, 0.9), (0.9, 0.2), (0.2, 0.9)])
def test_fifo_gives_every_word_once_and_in_order(bench: Bench, write: float, read: float) -> None:
    rng = np.random.default_rng(3)
    held: deque[int] = deque()
    filled = False
    for _ in range(2000):
        word, put, ready = int(rng.integers(256)), rng.random() < write, rng.random() < read
        put = put and not bench.get("fifo_full")
        bench.offer(fifo_in_valid=put, fifo_in_data=word, fifo_out_ready=ready)
        if bench.get("fifo_out_valid") and ready:
            assert bench.get("fifo_out_data") == held.popleft()
        if put:
            held.append(word)
        assert len(held) <= 5
        filled |= bool(bench.get("fifo_full"))
        bench.rise()
    assert filled == (write > read or write == 0.9)


def pooled(bench: Bench, name: str, maps: np.ndarray, pause: float) -> list[int]:
    """Stream maps (n, h, w, c) through a pool of two lanes; what comes out, flat."""
    rng = np.random.default_rng(4)
    waiting = deque(maps.reshape(-1, 2).tolist())
    out: list[int] = []
    for _ in range(4 * maps.size + 20):
        offer = bool(waiting) and rng.random() >= pause
        beat = waiting.popleft() if offer else [255, 255]
        bench.cycle(**{f"{name}_in_valid": offer, f"{name}_in_data": joined(beat, 8)})
        if bench.get(f"{name}_out_valid"):
            out += fields(bench.get(f"{name}_out_data"), 8, 2)
    return out


@pytest.mark.parametrize("pause", [0.0, 0.6])
@pytest.mark.parametrize(("name", "shape"), [("pool", (3, 5, 7, 6)), ("least", (9, 2, 2, 2))])
def test_pool_gives_the_maximum_of_each_square(
    bench: Bench, name: str, shape: tuple[int, int, int, int], pause: float
) -> None:
    maps = np.random.default_rng(5).integers(0, 256, shape)
    assert pooled(bench, name, maps, pause) == reference.pool(maps).reshape(-1).tolist()


def test_multipliers_give_a_product_each_cycle_five_cycles_later(bench: Bench) -> None:
    rng = np.random.default_rng(6)
    edges = [(-(1 << 16), -256), ((1 << 16) - 1, 255), (-(1 << 16), 255), (0, 0), (-1, -256), (1 << 15, 1), (8, 16)]
    pairs = edges + [(int(rng.integers(-(1 << 16), 1 << 16)), int(rng.integers(-256, 256))) for _ in range(400)]
    for number in range(len(pairs) + 4):
        a, b = pairs[min(number, len(pairs) - 1)]
        bench.cycle(mul_used=1, mul_a=a & 0x1FFFF, mul_b=b & 0x1FF)
        if number >= 4:
            a, b = pairs[number - 4]
            assert signed(bench.get("mul_dsp"), 26) == a * b
            for bits in (4, 5, 10, 16):
                assert signed(bench.get(f"mul_lut_{bits}"), bits + 9) == signed(a, bits) * b, (bits, a, b)


def test_a_block_that_is_not_used_gives_zero_and_the_next_product_is_right(bench: Bench) -> None:
    rng = np.random.default_rng(8)
    sent: deque[int] = deque()
    for _ in range(400):
        a, b, used = int(rng.integers(-99, 99)), int(rng.integers(-256, 256)), bool(rng.random() < 0.5)
        bench.cycle(mul_used=used, mul_a=a & 0x1FFFF, mul_b=b & 0x1FF)
        sent.append(a * b if used else 0)
        if len(sent) == 5:
            assert signed(bench.get("mul_dsp"), 26) == sent.popleft()


@pytest.mark.parametrize(("name", "shared"), [("mac_pack", True), ("mac_lut", False)])
def test_sums_of_products_begin_and_end_where_they_are_marked(bench: Bench, name: str, shared: bool) -> None:
    rng = np.random.default_rng(7)
    expected: deque[list[int]] = deque()
    total = np.zeros(3, np.int64)
    left, found, weights = 0, 0, 0
    for cycle in range(1200):
        valid = cycle < 1180 and rng.random() < 0.7
        first = left == 0
        if valid and first:
            left, total = int(rng.integers(1, 5)), np.zeros(3, np.int64)
        # Now and then the extremes: every weight the lowest or highest, every activation 255.
        extreme = rng.random() < 0.2
        a = np.full(3, 255) if extreme else rng.integers(0, 256, 3) * (rng.random(3) < 0.7)
        w = rng.choice([-15, 15], (3, 3)) if extreme else rng.integers(-15, 16, (3, 3))
        if valid:
            left -= 1
            total = total + w @ a
            if left == 0:
                expected.append(total.tolist())
        sent = w.copy()
        if shared:
            sent[1] -= w[0] < 0
        bench.cycle(
            mac_valid=valid, mac_first=first, mac_last=left == 0, mac_a=joined(a.tolist(), 8),
            mac_w=weights,
        )  # fmt: skip
        weights = joined(sent.reshape(-1).tolist(), 5)  # a cycle after their activations
        if bench.get(f"{name}_done"):
            sums = [signed(value, 20) for value in fields(bench.get(f"{name}_acc"), 20, 3)]
            assert sums == expected.popleft()
            found += 1
    assert not expected or left
    assert found > 200


@pytest.mark.parametrize("name", ["scaled", "scaled_lut", "raw"])
def test_requantiser_computes_what_the_graph_says(bench: Bench, name: str) -> None:
    rng = np.random.default_rng(8)
    node = Requantise("r", np.array(MULTIPLIER, np.int32), pre_shift=1, shift=13)
    every, lanes = (4, 1) if name == "raw" else (2, 2)
    sums = rng.integers(-20000, 20000, (60, 2, 4)) >> rng.integers(0, 8, (60, 2, 4))
    biased = (sums.reshape(60, 8) + np.array(BIAS)).astype(np.int64)
    scaled = reference.requantise(node, biased[:, None, None, :]).reshape(-1)
    wanted = biased.reshape(-1) if name == "raw" else scaled
    waiting, out = deque(sums.reshape(-1, 4).tolist()), []
    since = every
    for _ in range(1500):
        done = bool(waiting) and since >= every and rng.random() < 0.8
        since = 1 if done else since + 1
        acc = joined(waiting.popleft() if done else [-1] * 4, 16)
        bench.cycle(requantise_done=done, requantise_acc=acc)
        if bench.get(f"{name}_valid"):
            out += fields(bench.get(f"{name}_data"), 16 if name == "raw" else 8, lanes)
    assert [signed(value, 16) if name == "raw" else value for value in out] == wanted.tolist()
    assert name == "raw" or len(set(out)) > 60


def test_input_shows_the_pixel_above_in_place_of_a_missing_one_and_waits_for_free_rows(bench: Bench) -> None:
    rng = np.random.default_rng(9)
    pixels = rng.integers(0, 256, (20, 3, 2, 2))
    mask = rng.random((20, 3, 2)) < 0.6
    shown = pixels.copy()
    for row in range(3):
        above = np.array([1, 2]) if row == 0 else shown[:, row - 1]
        shown[:, row] = np.where(mask[:, row, :, None], pixels[:, row], above)
    beats, arrived = pixels.reshape(-1, 2).tolist(), mask.reshape(-1).tolist()
    sent, room, out = 0, 2, []
    for _ in range(4000):
        offer = sent < len(beats) and rng.random() < 0.6
        free = room < 2 and rng.random() < 0.1
        room += free
        bench.offer(
            in_s_valid=offer, in_s_data=joined(beats[sent], 8) if offer else 0xFFFF,
            in_s_mask=offer and arrived[sent], in_freed=free,
        )  # fmt: skip
        if offer and bench.get("in_s_ready"):
            room -= sent % 2 == 0
            assert room >= 0
            sent += 1
        bench.rise()
        if bench.get("in_out_valid"):
            out += fields(bench.get("in_out_data"), 8, 2)
    assert out == shown.reshape(-1).tolist()


@pytest.mark.parametrize("ready", [1.0, 0.4])
def test_output_keeps_a_logit_until_it_is_taken_and_marks_the_last(bench: Bench, ready: float) -> None:
    rng = np.random.default_rng(10)
    logits = rng.integers(-(1 << 19), 1 << 19, (40, 6)).tolist()
    waiting, words, room = deque(logits), deque[list[int]](), 2
    out: list[int] = []
    kept: tuple[int, int] | None = None
    for _ in range(2000):
        if not words and waiting and room:
            image, room = waiting.popleft(), room - 1
            words.extend(image[i : i + 2] for i in range(0, 6, 2))
        put = bool(words) and rng.random() < 0.7
        word = joined(words.popleft() if put else [0, 0], 20)
        take = rng.random() < ready
        bench.offer(out_in_valid=put, out_in_data=word, out_m_ready=take)
        room += bench.get("out_freed")
        if bench.get("out_m_valid"):
            seen = bench.get("out_m_data"), bench.get("out_m_last")
            assert kept in (None, seen)
            assert seen[1] == (len(out) % 6 == 5)
            if take:
                out.append(signed(seen[0], 32))
            kept = None if take else seen
        else:
            assert kept is None
        bench.rise()
    assert out == [value for image in logits for value in image]
