"""The options of `hawkvision models add`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from hawkvision.models.input_spec import Interpolation

_INPUT: Final = "How the model gets its images"
_OUTPUT: Final = "What the model gives"
_STAGE: Final = "The stage"

Task = Annotated[str, typer.Option(help="Your task: a new name, or one that you have added to.")]
ModelFile = Annotated[Path, typer.Argument(help="An ONNX file that takes images.")]
Labels = Annotated[
    Path | None,
    typer.Option(
        help="File with one label a line, in the order of the outputs, or the folder of class folders.",
        rich_help_panel=_OUTPUT,
    ),
]
StageName = Annotated[str | None, typer.Option(help="Name of the stage; default: the file's.", rich_help_panel=_STAGE)]
Tier = Annotated[
    Literal["edge", "dc"] | None,
    typer.Option(help="Where it runs; default: the cheapest stage on the edge.", rich_help_panel=_STAGE),
]
Scale = Annotated[
    str | None,
    typer.Option(help="Pixels 0..255 are multiplied by it first, such as 1/255.", rich_help_panel=_INPUT),
]
Mean = Annotated[
    str | None,
    typer.Option(
        help="Then subtracted: one number, or one per channel as the model orders them.", rich_help_panel=_INPUT
    ),
]
Std = Annotated[
    str | None, typer.Option(help="Then divided by: one number, or one per channel.", rich_help_panel=_INPUT)
]
ChannelOrder = Annotated[
    Literal["rgb", "bgr"] | None, typer.Option(help="Order of the channels.", rich_help_panel=_INPUT)
]
Layout = Annotated[
    Literal["nchw", "nhwc"] | None,
    typer.Option(help="Order of the axes; default: as the graph's shape says.", rich_help_panel=_INPUT),
]
Size = Annotated[str | None, typer.Option(help="HEIGHTxWIDTH, for a graph that takes any.", rich_help_panel=_INPUT)]
Fit = Annotated[
    Literal["crop", "stretch", "letterbox"] | None,
    typer.Option(help="How images of another shape are fitted to the input.", rich_help_panel=_INPUT),
]
Resize = Annotated[
    int | None,
    typer.Option(min=1, help="With crop: pixels of the shorter side before the crop.", rich_help_panel=_INPUT),
]
CropFraction = Annotated[
    float | None,
    typer.Option(min=0.01, max=1, help="With crop: the cut-out share of the side.", rich_help_panel=_INPUT),
]
ScaledBy = Annotated[
    Interpolation | None,
    typer.Option(
        help="How images are scaled: as Pillow or OpenCV do, or faster by bilinear, bicubic, area.",
        rich_help_panel=_INPUT,
    ),
]
PadValue = Annotated[
    int | None,
    typer.Option(min=0, max=255, help="With letterbox: grey beside the image; 114.", rich_help_panel=_INPUT),
]
PadPosition = Annotated[
    Literal["centre", "top_left"] | None,
    typer.Option(help="With letterbox: where the image lies; centre.", rich_help_panel=_INPUT),
]
Like = Annotated[
    str | None,
    typer.Option(help="A stage of the task that gets its images in the same way.", rich_help_panel=_INPUT),
]
Constants = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUES for a further input of the graph.", rich_help_panel=_INPUT),
]
Kind = Annotated[str | None, typer.Option(help="Kind of task; default: classification.", rich_help_panel=_OUTPUT)]
KindOptions = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE for the kind of task.", rich_help_panel=_OUTPUT)
]
Outputs = Annotated[
    str | None,
    typer.Option(
        help="The outputs to use, or tensors inside the graph, between commas; default: all outputs.",
        rich_help_panel=_OUTPUT,
    ),
]
OutputMeaning = Annotated[
    Literal["logits", "probabilities"] | None,
    typer.Option(help="What the numbers of a classifier are, if they do not tell.", rich_help_panel=_OUTPUT),
]
Decoder = Annotated[
    str | None, typer.Option(help="How predictions are read from the outputs.", rich_help_panel=_OUTPUT)
]
DecoderOptions = Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the decoder.", rich_help_panel=_OUTPUT)]
License = Annotated[
    str, typer.Option("--license", help="Licence of the model, for the record.", rich_help_panel=_STAGE)
]
