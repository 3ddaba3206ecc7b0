"""From an encoded image to a model's input: read the header, decode and place. Part of the edge's hot path.

simplejpeg (libjpeg-turbo) decodes JPEG, because it is fast and reports truncation; OpenCV decodes PNG and WebP. Both
release the GIL. Every function may be called from several threads at once. Figures:
`docs/design/inference-threads.md`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Final, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError, BadImage, TooLarge, UnsupportedMedia
from hawkvision.core.types import Pixels
from hawkvision.imaging import pillow_formats
from hawkvision.imaging.image_header import Encoded, ImageFormat, ImageHeader, other_format
from hawkvision.imaging.image_header import probe as probe_native
from hawkvision.imaging.jpeg_decoding import decode_jpeg
from hawkvision.imaging.jpeg_repair import scans
from hawkvision.imaging.other_headers import probe as probe_other
from hawkvision.imaging.placement import OVERSAMPLING as OVERSAMPLING
from hawkvision.imaging.placement import Rectangle, crop_scale, fitting, least_side, scale_of, whole_scaled
from hawkvision.imaging.png_repair import rewritten_png, sound_png, sound_webp
from hawkvision.models.input_spec import InputSpec, Interpolation

__all__ = [
    "ImageFormat",
    "ImageHeader",
    "decode",
    "least_side",
    "load_input",
    "load_inputs",
    "preprocess",
    "probe",
    "scale_of",
]

_Raster: TypeAlias = NDArray[Any]

# The node runs one decoding thread per core. OpenCV's own thread pool would only compete with these.
# Errors are raised as BadImage. OpenCV's log would repeat them on stderr, as often as a caller wishes.
cv2.setNumThreads(1)
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

MAX_SCANS = 100
"""Most scans of a JPEG of several scans; encoders write about ten. A scan may take sixty bytes and still visit every
pixel, so a body of 10 MiB could otherwise cause days of work (libjpeg-turbo's "LIMITSCANS", there 500)."""

MAX_SCANNED_PIXELS_RATIO = 20
"""Largest scans x pixels, in multiples of `max_pixels`: the largest image may have twenty scans, smaller ones more."""

MAX_BYTES_PER_PIXEL = 4
"""Largest raster in bytes per `max_pixels`: 200 MB at 50 MP. All kinds but one decode to three or four bytes a pixel
(alpha, CMYK) and may have all the pixels. PNGs of 16 bits with alpha take eight, and may have half as many."""

STRIP_PIXELS = 1 << 16
"""Pixels of four channels that are reduced to three at a time, so that intermediates of 200 KB stay in the cache."""

STRONG = 2.0
"""Shrinking by more than this factor averages areas."""

_OPENCV: Final[Mapping[str, int]] = {
    "bilinear": cv2.INTER_LINEAR,
    "bicubic": cv2.INTER_CUBIC,
    "area": cv2.INTER_AREA,
    "opencv_bilinear": cv2.INTER_LINEAR,
    "opencv_bicubic": cv2.INTER_CUBIC,
    "opencv_area": cv2.INTER_AREA,
}
_PILLOW: Final[Mapping[str, str]] = {"pillow_bilinear": "BILINEAR", "pillow_bicubic": "BICUBIC"}


def probe(body: Encoded) -> ImageHeader:
    """Read the header of an image: JPEG, PNG, WebP, and with the extra `formats` those of `imaging.pillow_formats`.

    Only code of this package reads it, and no more of it than stated bounds, so this may run on an event loop.

    Raises:
        BadImage: if the body is empty, or its header is cut off or breaks its format.
        UnsupportedMedia: if it is another format; the message names what it looks like and what is read.
    """
    try:
        return probe_native(body)
    except UnsupportedMedia:
        kind = other_format(body)
        if kind is None or not pillow_formats.readable(kind):
            raise
    return probe_other(body, kind)


def load_input(
    body: Encoded, spec: InputSpec, *, max_pixels: int, header: ImageHeader | None = None
) -> tuple[Pixels, ImageHeader]:
    """An encoded image as a model's input, (height, width, 3), and its header.

    Pass `header` if the image has been probed already.

    Raises:
        BadImage, TooLarge, UnsupportedMedia: see `probe` and `decode`.
    """
    header = header or probe(body)
    return preprocess(decode(body, header, max_pixels=max_pixels, min_side=least_side(spec)), spec), header


def load_inputs(
    body: Encoded, specs: Iterable[InputSpec], *, max_pixels: int, header: ImageHeader | None = None
) -> Generator[Pixels]:
    """An encoded image as each model's input in turn, byte for byte as from `load_input`.

    The image is decoded once for all models that need the same scale, and only when its first input is requested. Pass
    `header` if the image has been probed already.

    Raises:
        BadImage, TooLarge, UnsupportedMedia: as `load_input`, at the first input.
    """
    header = header or probe(body)
    decoded: dict[int, Pixels] = {}
    for spec in specs:
        min_side = least_side(spec)
        scale = scale_of(header, min_side)
        if scale not in decoded:
            decoded[scale] = decode(body, header, max_pixels=max_pixels, min_side=min_side)
        yield preprocess(decoded[scale], spec)


def decode(body: Encoded, header: ImageHeader, *, max_pixels: int, min_side: int) -> Pixels:
    """The image as RGB (height, width, 3), upright.

    An incomplete image is refused, however little is missing, because no certificate covers it. The datagram transport
    has certificates for incomplete images, because it knows what is missing. Other deviations from a format are
    accepted if all samples are there (`jpeg_decoding`, `png_repair`).

    A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size: the smallest whose shorter side is at least `min_side`. Alpha
    is blended with white. Grey is repeated. Samples of 16 bits keep their upper byte. CMYK is taken as inverted, as
    Adobe writes it, and multiplied out without a colour profile. Of an animation the first frame is used. Transparent
    grey levels of a grey PNG (tRNS) are taken as opaque.

    Raises:
        TooLarge: if the header declares more than `max_pixels`, or a raster of more than `MAX_BYTES_PER_PIXEL` times as
            many bytes; nothing has been decoded then.
        BadImage: if the image data are cut off, corrupt, or not of the declared size.
    """
    if header.pixels > max_pixels:
        raise TooLarge(f"the image has {header.width}x{header.height} = {header.pixels} pixels; at most {max_pixels}")
    # OpenCV reduces 16-bit samples in decoding, except with alpha.
    raster_bytes = header.pixels * (8 if header.alpha and header.depth == 16 else 4)
    if raster_bytes > MAX_BYTES_PER_PIXEL * max_pixels:
        raise TooLarge(
            f"the image's {header.width}x{header.height} pixels of {header.depth}-bit samples with alpha decode to "
            f"{raster_bytes} bytes; at most {MAX_BYTES_PER_PIXEL * max_pixels}"
        )
    data = body if isinstance(body, bytes) else bytes(body)
    match header.format:
        case ImageFormat.JPEG:
            pixels = _decode_jpeg(data, header, max_pixels, min_side)
        case ImageFormat.PNG:
            pixels = _decode_png(data, header)
        case ImageFormat.WEBP:
            pixels = _decode_opencv(sound_webp(data), header)
        case _:
            raster = pillow_formats.decode(data, header)
            pixels = _on_white(raster) if raster.shape[2] == 4 else raster
    return _upright(pixels, header.orientation)


def preprocess(pixels: Pixels, spec: InputSpec) -> Pixels:
    """Place an image into an input, (spec.height, spec.width, 3), as `InputSpec` describes.

    A crop is centred, has the input's aspect and is `crop_fraction` of the largest such rectangle; for a square input,
    of the centred square. An interpolation of a library scales the whole image as that library does, and then crops.
    Otherwise shrinking by more than two averages areas, whatever the variant's interpolation, because
    bilinear and bicubic sampling use only two and four pixels and would alias.
    """
    height, width = pixels.shape[:2]
    if spec.exact:
        return _exactly(pixels, spec)
    source, target = fitting(height, width, spec)
    if spec.fit == "crop":
        crop = pixels[source.top : source.top + source.height, source.left : source.left + source.width]
        strongly = crop_scale(height, width, spec) > STRONG
        return scaled(crop, target.height, target.width, "area" if strongly else spec.interpolation)
    return _padded(_shrunk(pixels, target.height, target.width, spec.interpolation), target, spec)


def scaled(pixels: Pixels, height: int, width: int, interpolation: Interpolation) -> Pixels:
    """The image (h, w, 3) as (height, width, 3), scaled as the interpolations of `InputSpec` say.

    bilinear, bicubic, area    as `cv2.resize`; `preprocess` averages areas instead when shrinking by more than two
    opencv_*                   as `cv2.resize` at any factor; bilinear is also TensorFlow's and Keras' `resize`
    pillow_*                   as Pillow's `Image.resize`, whose filters widen with the factor; torchvision's `Resize`

    Raises:
        BackendError: if the interpolation needs Pillow, and it is not installed.
    """
    if pixels.shape[:2] == (height, width):
        return np.ascontiguousarray(pixels)
    made: Pixels
    if interpolation in _PILLOW:
        pillow = _pillow()
        image = pillow.fromarray(np.ascontiguousarray(pixels))
        made = np.asarray(image.resize((width, height), pillow.Resampling[_PILLOW[interpolation]]))
    else:
        made = cv2.resize(pixels, (width, height), interpolation=_OPENCV[interpolation])
    return made


@functools.cache
def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise BackendError(
            "Pillow is not installed, which this interpolation needs: in a checkout, pip install '.[formats]'"
        ) from None


def _exactly(pixels: Pixels, spec: InputSpec) -> Pixels:
    """The whole image scaled in one step, then cropped or padded, as libraries do."""
    height, width = pixels.shape[:2]
    whole = whole_scaled(height, width, spec)
    if whole is not None:
        made = scaled(pixels, whole.height, whole.width, spec.interpolation)
        return np.ascontiguousarray(made[whole.top : whole.top + spec.height, whole.left : whole.left + spec.width])
    source, target = fitting(height, width, spec)
    part = pixels[source.top : source.top + source.height, source.left : source.left + source.width]
    return _padded(scaled(part, target.height, target.width, spec.interpolation), target, spec)


def _padded(fitted: Pixels, target: Rectangle, spec: InputSpec) -> Pixels:
    if fitted.shape[:2] == (spec.height, spec.width):
        return fitted
    padded = np.full((spec.height, spec.width, 3), spec.pad_value, np.uint8)
    padded[target.top : target.top + target.height, target.left : target.left + target.width] = fitted
    return padded


def _shrunk(pixels: Pixels, height: int, width: int, interpolation: Interpolation) -> Pixels:
    """Scaled by different factors. If one side is to be averaged and the other enlarged, that happens in two steps."""
    rows, columns = pixels.shape[:2]
    if max(rows / height, columns / width) > STRONG:
        pixels = scaled(pixels, min(rows, height), min(columns, width), "area")
    return scaled(pixels, height, width, interpolation)


def _decode_jpeg(data: bytes, header: ImageHeader, max_pixels: int, min_side: int) -> Pixels:
    if header.multiscan:
        _check_scans(data, header, max_pixels)
    pixels = decode_jpeg(data, header, scale_of(header, min_side))
    return _fold(pixels, pixels, _multiplied_out) if pixels.shape[2] == 4 else pixels


def _check_scans(data: bytes, header: ImageHeader, max_pixels: int) -> None:
    # In entropy-coded data, 0xff is always followed by 0x00 or a restart marker, so this counts scans, those of
    # thumbnails in the metadata too. It takes 1 ms per MB.
    most = min(MAX_SCANS, MAX_SCANNED_PIXELS_RATIO * max_pixels // header.pixels)
    if data.count(b"\xff\xda") > most and (count := scans(data)) > most:
        raise TooLarge(f"JPEG: {count} scans of {header.width}x{header.height} pixels are more work than is done here")


def _decode_png(data: bytes, header: ImageHeader) -> Pixels:
    sound = sound_png(data)
    try:
        return _decode_opencv(sound, header)
    except BadImage:
        # Only the checksum of the raster, or the part behind it, may be wrong.
        return _decode_opencv(rewritten_png(sound), header)


def _decode_opencv(data: bytes, header: ImageHeader) -> Pixels:
    name = header.format.value.upper()
    flags = cv2.IMREAD_UNCHANGED if header.alpha else cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        raster: _Raster | None = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        raise BadImage(f"{name}: the image data are corrupt ({error.err or error})") from None
    if raster is None:
        raise BadImage(f"{name}: the image data are corrupt or cut off")
    if raster.shape[:2] != (header.height, header.width):
        raise BadImage(
            f"{name}: decoded to {raster.shape[1]}x{raster.shape[0]}, "
            f"the header declared {header.width}x{header.height}"
        )
    return _on_white(raster) if header.alpha else raster


def _on_white(decoded: _Raster) -> Pixels:
    """OpenCV's unchanged raster (grey, BGR or BGRA; 8 or 16 bits) as RGB over white. Its memory is overwritten."""
    raster = decoded
    if decoded.dtype == np.uint16:  # the upper byte of every sample, without a copy
        raster = decoded.view(np.uint8)[..., int(sys.byteorder == "little") :: 2]
    if raster.ndim == 2:
        grey: Pixels = cv2.cvtColor(np.ascontiguousarray(raster), cv2.COLOR_GRAY2RGB)
        return grey
    if raster.shape[2] == 3:  # alpha was declared and is not used
        opaque: Pixels = cv2.cvtColor(np.ascontiguousarray(raster), cv2.COLOR_BGR2RGB)
        return opaque
    return _fold(decoded, raster, _composited)


def _composited(bgra: Pixels) -> Pixels:
    """c·a + 255·(255 - a) over 255, computed as 255 less (255 - c)·a over 255."""
    painted: Pixels = cv2.bitwise_not(_shaded(cv2.bitwise_not(cv2.cvtColor(bgra, cv2.COLOR_BGRA2RGB)), bgra))
    return painted


def _multiplied_out(cmyk: Pixels) -> Pixels:
    """Inverted CMYK to RGB: each colour times black."""
    return _shaded(np.ascontiguousarray(cmyk[..., :3]), cmyk)


def _shaded(colours: Pixels, shades: Pixels) -> Pixels:
    """Colours (1, n, 3) times the fourth channel of shades (1, n, 4) over 255, rounded.

    OpenCV's 8-bit functions do this exactly: 255 is odd, so no quotient is halfway between two numbers.
    """
    shade = cv2.cvtColor(cv2.extractChannel(shades, 3), cv2.COLOR_GRAY2RGB)
    product: Pixels = cv2.multiply(colours, shade, scale=1 / 255)
    return product


def _fold(memory: _Raster, raster: Pixels, strip_of: Callable[[Pixels], Pixels]) -> Pixels:
    """A raster (height, width, 4) to three channels, strip by strip, in place.

    The three bytes a pixel of a strip never reach the next strip's four (or eight, of 16 bits), so an image needs no
    memory beyond its decoder's.
    """
    samples = raster.reshape(1, -1, 4)
    result = memory.view(np.uint8).reshape(-1)[: 3 * samples.shape[1]].reshape(1, -1, 3)
    for start in range(0, samples.shape[1], STRIP_PIXELS):
        strip = np.ascontiguousarray(samples[:, start : start + STRIP_PIXELS])
        result[:, start : start + STRIP_PIXELS] = strip_of(strip)
    return result.reshape(*raster.shape[:2], 3)


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Undo EXIF orientation (EXIF 2.32 §4.6.4, tag 0x0112)."""
    match orientation:
        case 2:
            turned = cv2.flip(pixels, 1)
        case 3:
            turned = cv2.rotate(pixels, cv2.ROTATE_180)
        case 4:
            turned = cv2.flip(pixels, 0)
        case 5:
            turned = cv2.transpose(pixels)
        case 6:
            turned = cv2.rotate(pixels, cv2.ROTATE_90_CLOCKWISE)
        case 7:
            turned = cv2.rotate(cv2.transpose(pixels), cv2.ROTATE_180)
        case 8:
            turned = cv2.rotate(pixels, cv2.ROTATE_90_COUNTERCLOCKWISE)
        case _:
            return pixels
    upright: Pixels = turned
    return upright
