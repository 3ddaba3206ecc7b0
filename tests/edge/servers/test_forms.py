"""Multipart forms as clients write them: image and fields are read, and errors say what is wrong."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edge.servers.forms import FORM_ON_LOOP_BYTES, MAX_FIELD_BYTES, MAX_PARTS, parse_form
from hawkvision.core.errors import BadField, BadImage
from tests.edge.conftest import Caller
from tests.images import encoded

TYPE = "multipart/form-data; boundary=b"
IMAGE = b"\xff\xd8\r\n--\r\n-b\r\n--x\0image"


def part(disposition: str, content: bytes, *lines: str) -> bytes:
    head = "\r\n".join((f"Content-Disposition: form-data{disposition}", *lines))
    return b"--b\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


@pytest.mark.parametrize(
    "disposition",
    [
        '; name="image"',
        "; name=image",
        ";name=image",
        '; name="image"; filename="cat.jpg"',
        "; name=image; filename=cat.jpg",
        '; filename="cat.jpg"; name="image"',
        '; filename="a;name=x.jpg"; name="image"',
        '; filename="quo\\"te.jpg"; name="image"',
        "; name=\"image\"; filename*=utf-8''T%C3%BCr.jpg",
        "; filename*=UTF-8'en'%e2%82%ac%20rates; name=image",
        '; name="image"; filename="Tur.jpg"; filename*=utf-8\'\'T%C3%BCr.jpg',
        '; name="image"; filename="Tür.jpg"',
        '; name="image"; filename=""',
        "; name*=utf-8''im%61ge",
        '; NAME="image"; FileName="x"',
        '; name="image";',
    ],
)
@pytest.mark.parametrize("line", [(), ("Content-Type: image/jpeg",), ("content-transfer-encoding: BINARY", "X-A: b")])
def test_the_image_is_found_however_its_part_is_written(disposition: str, line: tuple[str, ...]) -> None:
    assert parse_form(TYPE, form(part(disposition, IMAGE, *line))) == (IMAGE, [])


@pytest.mark.parametrize("before", [b"\r\n", b"This is a form.\r\n", b"--\r\n--c\r\n", b"bee\n\r\n"])
def test_a_preamble_is_ignored(before: bytes) -> None:
    whole = before + form(part("; name=image", IMAGE), part("; name=top_k", b"3"))
    assert parse_form(TYPE, whole) == (IMAGE, [("multipart", "top_k", "3")])


@pytest.mark.parametrize(
    "content_type",
    [
        TYPE,
        'multipart/form-data; boundary="b"',
        "Multipart/Form-Data; charset=utf-8; Boundary=b",
        "multipart/form-data;boundary=b;charset=UTF-8",
    ],
)
def test_fields_come_in_any_order(content_type: str) -> None:
    fields = [part('; name="quality"', b"fast"), part("; name=top_k", b"3", "Content-Type: text/plain; charset=utf-8")]
    for at in range(3):
        parts = [*fields]
        parts.insert(at, part('; name="image"; filename="x"', IMAGE))
        found = [("multipart", "quality", "fast"), ("multipart", "top_k", "3")]
        assert parse_form(content_type, form(*parts)) == (IMAGE, found)


@given(
    image=st.binary(min_size=1, max_size=300),
    fields=st.dictionaries(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.text(max_size=20), max_size=4),
    at=st.integers(0, 4),
    boundary=st.from_regex(r"[A-Za-z0-9'()+_,./:=?-]{1,40}", fullmatch=True),
)
def test_images_and_fields_survive_a_form(image: bytes, fields: dict[str, str], at: int, boundary: str) -> None:
    delimiter = b"--" + boundary.encode()
    assume("image" not in fields)
    assume(delimiter not in image and not any(delimiter in value.encode() for value in fields.values()))
    parts = [f'; name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts.insert(at, b'; name="image"; filename="x"\r\n\r\n' + image)
    body = b"".join(delimiter + b"\r\nContent-Disposition: form-data" + one + b"\r\n" for one in parts)
    found, said = parse_form(f'multipart/form-data; boundary="{boundary}"', body + delimiter + b"--")
    assert found == image
    assert said == [("multipart", name, value) for name, value in fields.items()]


@given(data=st.data())
def test_damaged_forms_are_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(form(part('; name="quality"', b"fast"), part("; name=\"image\"; filename*=utf-8''x", IMAGE)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadField):
        parse_form(TYPE, bytes(whole))


@given(cut=st.integers(1, 200))
def test_a_truncated_form_is_refused(cut: int) -> None:
    whole = form(part('; name="image"', IMAGE)).rstrip()
    with pytest.raises(BadField):
        parse_form(TYPE, whole[: max(0, len(whole) - cut)])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (form(part('; name="photo"; filename="x"', b"x")), "must be named 'image', got 'photo'"),
        (form(part("; name=\"photo\"; filename*=utf-8''x", b"x")), "must be named 'image', got 'photo'"),
        (form(part('; name="quality"', b"best")), "part named 'image'"),
        (form(part('; name="image"', b"x"), part('; name="image"; filename="y"', b"y")), "several"),
        (form(part("", b"x")), "part 1 has no name"),
        (form(part('; name="image"', b"eA==", "Content-Transfer-Encoding: base64")), "encoded in 'base64'"),
        (form(part('; name="stream"', b"\xff"), part('; name="image"', b"x")), "not UTF-8"),
        (form(part('; name="stream"', bytes(MAX_FIELD_BYTES + 1)), part('; name="image"', b"x")), "exceeds 4096"),
        (form(*[part('; name="stream"', b"x")] * (MAX_PARTS + 1), part('; name="image"', b"x")), "at most 33 parts"),
        (form(part('; name="image"', b"\r\n--bx" * 1_000_000)), "at most 33 parts"),
        (form(b"--b\r\n" + b"a:\r\n" * 1_000_000 + b"\r\nx\r\n"), "multipart"),
        (b"--b\r\nnonsense", "multipart"),
        (b"--c\r\n", "multipart"),
        (b"", "cut off"),
    ],
)
def test_errors_say_what_is_wrong(body: bytes, says: str) -> None:
    with pytest.raises(BadField, match=says):
        parse_form(TYPE, body)


def test_an_empty_image_is_none() -> None:
    with pytest.raises(BadImage, match="the part 'image' is empty"):
        parse_form(TYPE, form(part('; name="image"', b"")))


@pytest.mark.parametrize(
    "written", ["; name=\"image\"; filename*=utf-8''T%C3%BCr.jpg", '; name="image"', "; name=image"]
)
def test_a_node_answers_forms_small_and_large(caller: Caller, written: str) -> None:
    clean = encoded()
    for comments in (0, 4):  # of JPEG; a decoder passes over them
        image = clean[:2] + b"".join(b"\xff\xfe\xff\xff" + bytes(65_533) for _ in range(comments)) + clean[2:]
        assert (len(image) > FORM_ON_LOOP_BYTES) == (comments > 0)
        body = form(part('; name="quality"', b"fast"), part(written, image, "Content-Type: image/jpeg"))
        reply = caller.classify(body, **{"Content-Type": TYPE})
        assert reply.status == 200, reply.body
        assert reply.json["accuracy"]["target"] == {"quality": "fast"}
