"""Thousands of malformed bodies and fields against a real node: every one a documented 4xx, none harms the next."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from urllib.parse import quote

from hypothesis import given, settings
from hypothesis import strategies as st

from edge.servers.shared.request_fields import FIELDS
from tests.edge.conftest import Caller
from tests.fuzz.examples import SHARED_FIXTURE, examples
from tests.images import encoded

DOCUMENTED = {400, 404, 405, 408, 413, 415, 422}
GOOD = encoded(seed=99)
SIGNATURES = (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x10\0\0\0WEBPVP8 ", b"GIF89a", b"BM", b"II*\0")


def broken_images(rng: random.Random) -> Iterator[bytes]:
    """Every format cut at many places, with bytes flipped, with pieces repeated, swapped or missing."""
    for suffix in (".jpg", ".png", ".webp"):
        whole = encoded(suffix, seed=1)
        for cut in sorted(rng.sample(range(len(whole)), min(300, len(whole)))):
            yield whole[:cut]
        for _ in range(150):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 30)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            yield bytes(damaged)
        for _ in range(50):
            a, b = sorted(rng.sample(range(len(whole)), 2))
            yield whole[:a] + whole[b:]
            yield whole[:b] + whole[a:]
    for signature in (
        b"",
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"RIFF\x10\x00\x00\x00WEBPVP8 ",
        b"GIF89a",
        b"BM",
        b"II*\x00",
    ):
        for _ in range(40):
            yield signature + rng.randbytes(rng.randint(0, 200))


def test_two_thousand_broken_images_are_answered_and_none_harms_the_next_good_one(caller: Caller) -> None:
    before = caller.classify(GOOD, "quality=fast").json
    statuses: Counter[int] = Counter()
    rng = random.Random(20261121)
    for count, body in enumerate(broken_images(rng)):
        reply = caller.classify(body, "quality=fast")
        statuses[reply.status] += 1
        if reply.status != 200:  # a flipped byte may leave an image that still decodes
            assert reply.status in DOCUMENTED, (reply.status, body)
            assert set(reply.json) == {"error", "code"}
        if count % 50 == 0:
            after = caller.classify(GOOD, "quality=fast").json
            assert after["top_k"] == before["top_k"]
    assert statuses.total() > 1_700
    assert statuses[200] < statuses.total() / 4
    assert caller.get("/healthz").status == 200


@given(body=st.binary(max_size=2_000))
@settings(max_examples=examples(300), deadline=None, suppress_health_check=SHARED_FIXTURE)
def test_arbitrary_bytes_are_refused(caller: Caller, body: bytes) -> None:
    reply = caller.classify(body, "quality=fast")
    assert reply.status in (400, 413, 415)
    assert reply.json["code"] in ("bad_image", "too_large", "unsupported_media")


@given(
    pairs=st.lists(
        st.tuples(st.one_of(st.sampled_from(sorted(FIELDS)), st.text(max_size=20)), st.text(max_size=40)), max_size=6
    )
)
@settings(max_examples=examples(300), deadline=None, suppress_health_check=SHARED_FIXTURE)
def test_arbitrary_fields_are_understood_or_refused(caller: Caller, pairs: list[tuple[str, str]]) -> None:
    query = "&".join(f"{quote(name)}={quote(value)}" for name, value in pairs)
    reply = caller.classify(GOOD, query)
    assert reply.status in (200, 400, 404, 422), reply.body
    if reply.status != 200:
        assert {"error", "code"} <= set(reply.json)


@given(body=st.binary(max_size=600), boundary=st.text(alphabet="ab-'\" ;=", max_size=12))
@settings(max_examples=examples(200), deadline=None, suppress_health_check=SHARED_FIXTURE)
def test_arbitrary_multipart_bodies_are_refused(caller: Caller, body: bytes, boundary: str) -> None:
    reply = caller.classify(body, **{"Content-Type": f"multipart/form-data; boundary={boundary}"})
    assert reply.status in DOCUMENTED, reply.body
    assert set(reply.json) == {"error", "code"}
