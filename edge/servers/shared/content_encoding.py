"""Request bodies without their Content-Encoding, within the bounds of the bodies as they arrive."""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from edge.servers.shared.http_messages import Headers, header
from hawkvision.core.errors import BadField, TooLarge, UnsupportedMedia
from hawkvision.servers.bodies import Body

_WINDOW_BITS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's numbers for the two formats (RFC 1952 and RFC 1950)."""


async def read_body(body: Body, headers: Headers, limit: int) -> bytes:
    """The whole body of a request, decoded.

    Args:
        body: of the request.
        headers: of the request.
        limit: most bytes of the decoded body.

    Raises:
        HawkVisionError: as `Body.read` and `inflate`.
    """
    data = await body.read(header(headers, b"content-length"))
    encoding = header(headers, b"content-encoding")
    if encoding is None:
        return data
    data = await asyncio.to_thread(inflate, data, encoding, limit)  # ten megabytes take some ten milliseconds
    body.hold(len(data))
    return data


def inflate(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo the Content-Encoding of a body.

    Raises:
        UnsupportedMedia: for an encoding other than gzip and deflate.
        BadField: if the body is not in that encoding, or is cut off.
        TooLarge: if it inflates to more than `limit` bytes; inflation stops there.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    bits = _WINDOW_BITS.get(name)
    if bits is None:
        raise UnsupportedMedia(f"Content-Encoding {name[:60]!r} is not read; gzip and deflate are")
    inflater = zlib.decompressobj(bits)
    try:
        inflated = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadField(f"Content-Encoding: the body is not {name}: {error}") from None
    if len(inflated) > limit:
        raise TooLarge(f"the body has more than {limit} bytes once it is inflated")
    if not inflater.eof or inflater.unused_data:
        raise BadField(f"Content-Encoding: the {name} body is cut off or has bytes behind its end")
    return inflated
