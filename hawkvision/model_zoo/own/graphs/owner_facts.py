"""What only a model's owner knows: how images were prepared for it, and what its numbers mean.

A wrong guess costs accuracy silently, so nothing is guessed: `resolve` asks for all that is missing at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from hawkvision.core.errors import MALFORMED, ConfigError
from hawkvision.model_zoo.own.graphs.graph_facts import SIDES, GraphFacts, Layout
from hawkvision.models.input_spec import Fit, InputSpec, Interpolation
from hawkvision.tasks.decoders.decoder import UNSTATED
from hawkvision.tasks.decoders.registry import decoder_class

ChannelOrder: TypeAlias = Literal["rgb", "bgr"]
OutputMeaning: TypeAlias = Literal["logits", "probabilities"]
Triple: TypeAlias = tuple[float, float, float]
Missing: TypeAlias = tuple[str, str, str]
"""A fact that is missing: the option that states it, what it means, and a value as a placeholder."""
LOGITS_DECODER: Final = "logits"
DECODER_OPTION: Final = "--decoder-option"
MAX_DIGITS: Final = 9
"""The longest number of a side."""


@dataclass(frozen=True, slots=True)
class OwnerFacts:
    """What the owner said; None is unsaid. Numbers of channels are in the order in which the model takes them."""

    layout: Layout | None = None
    size: tuple[int, int] | None = None
    """Height and width, for graphs that take any."""
    scale: float | None = None
    """Pixels 0..255 are multiplied by it first."""
    mean: Sequence[float] | None = None
    """Then subtracted: one number, or one per channel."""
    std: Sequence[float] | None = None
    """Then divided by."""
    channel_order: ChannelOrder | None = None
    fit: Fit | None = None
    resize: int | None = None
    """With `crop`: the shorter side is scaled to so many pixels before the crop."""
    crop_fraction: float | None = None
    """With `crop`: the share of the shorter side that is cut out."""
    interpolation: Interpolation | None = None
    pad_value: int | None = None
    pad_position: Literal["centre", "top_left"] | None = None
    outputs: Sequence[str] = ()
    output_meaning: OutputMeaning | None = None
    decoder: str | None = None
    decoder_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preparation:
    """How the model gets its input from an image, complete."""

    spec: InputSpec
    layout: Layout
    channels: int
    """3, or 1 for grey."""
    normalised: bool
    """Whether the graph takes normalised numbers, not bytes."""


def missing_facts(facts: OwnerFacts, graph: GraphFacts, decoders: Sequence[str]) -> list[Missing]:
    """All facts that neither owner nor graph state; `decoders` are those that fit the kind of task."""
    return [*_missing_of_the_input(facts, graph), *_missing_of_the_output(facts, graph, decoders)]


def _missing_of_the_input(facts: OwnerFacts, graph: GraphFacts) -> Iterator[Missing]:
    layout = facts.layout or graph.layout
    if layout is None:
        yield ("--layout", "nchw (PyTorch) or nhwc (Keras): the graph's shape fits both", "LAYOUT")
    _, _, channels = (None, None, None) if layout is None else graph.sizes(layout)
    readings: list[Layout] = ["nchw", "nhwc"] if layout is None else [layout]
    if facts.size is None and any(None in graph.sizes(each)[:2] for each in readings):
        yield ("--size", "HEIGHTxWIDTH: the graph takes any", "HEIGHTxWIDTH")
    if graph.type != "uint8":
        if facts.scale is None:
            yield ("--scale", "what pixels 0..255 are multiplied by first: 1/255 (PyTorch), 1 for none", "SCALE")
        if facts.mean is None:
            yield ("--mean", "what is then subtracted, for each channel: 0.485,0.456,0.406 or 0", "MEAN")
        if facts.std is None:
            yield ("--std", "what is then divided by, for each channel: 0.229,0.224,0.225 or 1", "STD")
    if channels != 1 and facts.channel_order is None:
        yield ("--channel-order", "rgb, or bgr (images read with OpenCV)", "ORDER")
    if facts.fit is None:
        yield ("--fit", "crop (centred, with --resize), stretch (Keras's image_size) or letterbox (YOLO)", "FIT")
    if facts.fit == "crop" and facts.resize is None and facts.crop_fraction is None:
        yield ("--resize", "the shorter side before the crop: 256 in torchvision; the input's for none", "PIXELS")
    if facts.interpolation is None:
        yield (
            "--interpolation",
            "pillow_bilinear or pillow_bicubic (PIL, torchvision), opencv_bilinear (cv2.resize, Keras), opencv_area; "
            "or bilinear, bicubic, area: faster, but not exactly as those",
            "METHOD",
        )


def _missing_of_the_output(facts: OwnerFacts, graph: GraphFacts, decoders: Sequence[str]) -> Iterator[Missing]:
    decoder = facts.decoder or (decoders[0] if len(decoders) == 1 else None)
    if decoder is None:
        yield ("--decoder", f"how boxes are read from the outputs: {', '.join(decoders)}", "DECODER")
    for option, meaning in unstated_options(decoder, facts.decoder_options).items():
        yield (DECODER_OPTION, f"{option}=VALUE: {meaning}", f"{option}=VALUE")
    if decoder == LOGITS_DECODER and len(facts.outputs or graph.outputs) != 1:
        names = ", ".join(output.name for output in graph.outputs)
        yield ("--outputs", f"the one that gives the logits or probabilities, of {names}", "NAME")


def unstated_options(decoder: str | None, stated: Mapping[str, Any]) -> dict[str, str]:
    """The options of a decoder that its owner must still state, with their meaning."""
    asked = {} if decoder is None else decoder_class(decoder).asked
    given = {*stated, *(("first_class",) if "class_map" in stated else ())}
    return {
        option: meaning for option, meaning in asked.items() if option not in given or stated.get(option) == UNSTATED
    }


def refusal(path: str, missing: Sequence[Missing], given: Sequence[str], stated: str) -> ConfigError:
    """The error that lists all missing facts and those that are stated, with the command line to complete; `given` are
    its words so far.
    """
    width = max(len(option) for option, _, _ in missing)
    asked = [f"  {option:<{width}}  {meaning}" for option, meaning, _ in missing]
    words = [word for option, _, example in missing for word in (option, example)]
    command = f"hawkvision models add {shlex.join([*given, *words])}"
    lines = [f"{path}: facts are missing that the file does not state:", *asked, f"the file states: {stated}"]
    return ConfigError("\n".join([*lines, "put your values in place of the capitals:", f"  {command}"]))


def resolve(facts: OwnerFacts, graph: GraphFacts) -> Preparation:
    """The preparation, once nothing of it is missing.

    Raises:
        ConfigError: if facts contradict each other or the graph.
    """
    layout = facts.layout or graph.layout
    assert layout is not None
    height, width, channels = graph.sizes(layout)
    if channels not in (None, 1, 3):
        raise ConfigError(
            f"--layout {layout}: the graph's shape {graph.shape} then has {channels} channels, not 1 or 3"
        )
    size = _size(facts, height, width)
    if not all(SIDES[0] <= side <= SIDES[1] for side in size):
        raise ConfigError(f"the graph takes {size[0]}x{size[1]}; expected sides of {SIDES[0]} to {SIDES[1]} pixels")
    normalised = graph.type != "uint8"
    if not normalised and (facts.scale, facts.mean, facts.std) != (None, None, None):
        raise ConfigError(
            "--scale, --mean and --std: the graph takes bytes, and so normalises them itself; leave the options out"
        )
    scale = 1.0 if facts.scale is None else facts.scale
    if scale <= 0:
        raise ConfigError(f"--scale: expected a positive number, got {scale:g}")
    assert facts.fit is not None
    fields = {
        "height": size[0],
        "width": size[1],
        "mean": [_on_bytes(each, scale) for each in _triple("--mean", facts.mean or (0.0,))],
        "std": [_on_bytes(each, scale) for each in _triple("--std", facts.std or (1.0,))],
        "interpolation": facts.interpolation,
        "crop_fraction": _crop_fraction(facts, size),
        "channel_order": facts.channel_order or "rgb",
        "fit": facts.fit,
    }
    fields |= {} if facts.pad_value is None else {"pad_value": facts.pad_value}
    fields |= {} if facts.pad_position is None else {"pad_position": facts.pad_position}
    try:
        spec = msgspec.convert(fields, InputSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the input: {error}") from None
    contradiction = spec.contradiction()
    if contradiction is not None:
        raise ConfigError(f"the input: {contradiction}")
    return Preparation(spec, layout, channels or 3, normalised)


def like(facts: OwnerFacts, spec: InputSpec) -> OwnerFacts:
    """The facts, with what is unsaid about the preparation taken from another stage's input."""
    known: dict[str, Any] = {
        "scale": 1.0,
        "mean": spec.mean,
        "std": spec.std,
        "channel_order": spec.channel_order,
        "fit": spec.fit,
        "interpolation": spec.interpolation,
    }
    known |= {"crop_fraction": spec.crop_fraction} if spec.fit == "crop" else {}
    known |= {"pad_value": spec.pad_value, "pad_position": spec.pad_position} if spec.fit == "letterbox" else {}
    if (facts.scale, facts.mean, facts.std) != (None, None, None):
        del known["scale"], known["mean"], known["std"]
    if facts.resize is not None:
        known.pop("crop_fraction", None)
    return replace(facts, **{name: value for name, value in known.items() if getattr(facts, name) is None})


def _size(facts: OwnerFacts, height: int | None, width: int | None) -> tuple[int, int]:
    if height is None or width is None:
        assert facts.size is not None
        return facts.size
    if facts.size not in (None, (height, width)):
        raise ConfigError(f"--size: the graph takes {height}x{width} only, got {facts.size[0]}x{facts.size[1]}")
    return height, width


def _triple(option: str, values: Sequence[float]) -> Triple:
    if len(values) not in (1, 3):
        raise ConfigError(f"{option}: expected one number or three, got {len(values)}")
    if option == "--std" and not all(value > 0 for value in values):
        raise ConfigError(f"{option}: expected positive numbers, got {', '.join(map(str, values))}")
    return (values[0], values[0], values[0]) if len(values) == 1 else (values[0], values[1], values[2])


def _on_bytes(value: float, scale: float) -> float:
    """A number of scaled pixels on the scale 0..255, without the last digits' noise."""
    return float(f"{value / scale:.12g}")


def _crop_fraction(facts: OwnerFacts, size: tuple[int, int]) -> float:
    if facts.resize is None:
        return 1.0 if facts.crop_fraction is None else facts.crop_fraction
    if facts.crop_fraction is not None:
        raise ConfigError("--resize and --crop-fraction exclude one another: the crop is the input's share of --resize")
    if facts.fit != "crop":
        raise ConfigError(f"--resize applies to --fit crop, got --fit {facts.fit}")
    if facts.resize < min(size):
        raise ConfigError(f"--resize: expected at least {min(size)}, the input's side, got {facts.resize}")
    return min(size) / facts.resize


# ------------------------------------------------------------------------------------------- words of a command line


def number(option: str, text: str) -> float:
    """A number or a fraction, such as `0.5` or `1/255`.

    Raises:
        ConfigError: naming the option.
    """
    above, slash, below = text.partition("/")
    try:
        value = float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{option}: expected a number such as 0.5 or 1/255, got {text!r}") from None
    if not abs(value) < float("inf"):
        raise ConfigError(f"{option}: expected a finite number, got {text!r}")
    return value


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers between commas.

    Raises:
        ConfigError: naming the option.
    """
    return tuple(number(option, word) for word in text.split(","))


def sides(option: str, text: str) -> tuple[int, int]:
    """Height and width, as in `224x224`; one number stands for both.

    Raises:
        ConfigError: naming the option.
    """
    words = text.lower().split("x")
    if len(words) > 2 or not all(word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS for word in words):
        raise ConfigError(f"{option}: expected HEIGHTxWIDTH such as 224x224, got {text!r}")
    return int(words[0]), int(words[-1])


def one_of(option: str, text: str | None, kind: Any) -> Any:
    """The word, which must be one of a `Literal` type; None stays None.

    Raises:
        ConfigError: naming the option and the words.
    """
    if text is not None and text not in get_args(kind):
        raise ConfigError(f"{option}: expected {', '.join(get_args(kind))}, got {text!r}")
    return text


def option_values(option: str, words: Sequence[str]) -> dict[str, Any]:
    """Options of a kind or decoder, as in `score=0.3`, with JSON values; other words are text.

    Raises:
        ConfigError: naming the word.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and name):
            raise ConfigError(f"{option}: expected NAME=VALUE, got {word!r}")
        try:
            found[name] = msgspec.json.decode(value)
        except MALFORMED:
            found[name] = value
    return found
