"""Odd image files against a real node: answered as their sound twins are; what is cut off is refused and says so."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.edge.conftest import Caller
from tests.hawkvision.imaging.images import encode, scene
from tests.odd_images import odd_jpegs, odd_pngs

PIXELS = scene(96, 112)
ODD = {**odd_jpegs(PIXELS), **odd_pngs(PIXELS)}


def answer(caller: Caller, body: bytes) -> object:
    reply = caller.classify(body, "quality=fast")
    assert reply.status == 200, reply.body
    return reply.json["top_k"]


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_file_is_answered_as_its_sound_twin(caller: Caller, kind: str) -> None:
    assert answer(caller, ODD[kind].body) == answer(caller, ODD[kind].twin)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "AVIF"])
def test_other_formats_are_answered_as_the_same_pixels_in_png(caller: Caller, kind: str) -> None:
    body = encode(Image.fromarray(PIXELS), kind)
    pixels = np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))
    assert answer(caller, body) == answer(caller, encode(Image.fromarray(pixels), "PNG"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("share", [0.6, 0.95])
def test_a_truncated_file_of_any_format_is_refused(caller: Caller, kind: str, share: float) -> None:
    whole = encode(Image.fromarray(PIXELS), kind)
    reply = caller.classify(whole[: int(share * len(whole))], "quality=fast")
    assert (reply.status, reply.json["code"]) == (400, "bad_image")
    assert "cut off" in reply.json["error"]
