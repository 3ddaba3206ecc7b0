"""Options that several commands share, and those of the commands that ask: a target, and how a node is reached."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from hawkvision.core.advice import remember
from hawkvision.core.command_line import ARGUMENT

Task: TypeAlias = Annotated[str, Meta(description="The task.")]
OwnTask: TypeAlias = Annotated[str, Meta(description="Your task: a new name, or one that you have added to.")]
ModelsDir: TypeAlias = Annotated[
    Path | None,
    Meta(description="Folder of manifests; default: those of HawkVision and ~/.local/share/hawkvision/models."),
]
Profile: TypeAlias = Annotated[Path | None, Meta(description="The profile; default: the task's own.")]
ClassMap: TypeAlias = Annotated[
    Path | None, Meta(description="File with the label or index of each class directory: DIRECTORY,LABEL a line.")
]
CleanIds: TypeAlias = Annotated[
    Path | None, Meta(description="File with the ids of the images that no model was trained on; all others were.")
]
TrainedImages: TypeAlias = Annotated[
    Literal["refuse", "leave-out", "fit"],
    Meta(description="Images that a model was trained on: refuse them, leave them out, or only fit on them."),
]
Compared: TypeAlias = Annotated[
    int, Meta(ge=1, description="Configurations ever compared on the certifying images: divides delta.")
]
OperateKey: TypeAlias = Annotated[
    str | None,
    Meta(description="The node's key; it must allow `operate`.", extra={"variable": "HAWKVISION_API_KEY"}),
]
Authority: TypeAlias = Annotated[
    Path | None,
    Meta(description="PEM file of the node's certificate authority.", extra={"variable": "HAWKVISION_CA"}),
]
Unlabelled: TypeAlias = Annotated[bool, Meta(description="The images have no labels.")]

NODE_URL: Final = "http://127.0.0.1:8080"
"""Where commands look for a node."""
_ASK: Final = "What to ask"
_NODE: Final = "The node"
_OUTPUT: Final = "Output"


# fmt: off
class AskOptions(msgspec.Struct, kw_only=True, frozen=True):
    """The options of the commands that ask."""

    images: Annotated[list[str], Meta(
        description="Images, folders of them, or patterns such as 'shots/**/*.jpg'.", extra=ARGUMENT)]
    min_accuracy: Annotated[float, Meta(
        ge=0, le=1, title=_ASK, description="At least this share of answers right.")] | None = None
    max_accuracy_drop: Annotated[float, Meta(
        ge=0, le=1, title=_ASK, description="At most this much less accurate than the reference stage.")] | None = None
    quality: Annotated[Literal["fast", "balanced", "best"] | None, Meta(
        title=_ASK, description="A target for callers who choose no number; default: balanced.")] = None
    deadline_ms: Annotated[float, Meta(
        ge=0, title=_ASK, description="Milliseconds from the first byte received; default: none.")] | None = None
    on_miss: Annotated[Literal["degrade", "wait", "fail"] | None, Meta(
        title=_ASK,
        description="When the deadline would pass: answer below target, wait, or fail; default: degrade.")] = None
    stream: Annotated[str | None, Meta(title=_ASK, description="Name of the stream.")] = None
    task: Annotated[str | None, Meta(title=_ASK, description="The task; default: the node's.")] = None
    url: Annotated[str, Meta(
        title=_NODE, description="Address of the edge node.", extra={"variable": "HAWKVISION_URL"},
    )] = NODE_URL
    wait: Annotated[float, Meta(
        ge=0, le=3600, title=_NODE,
        description="Seconds to wait for a node that is starting; 0 does not wait.")] = 0.0
    api_key: Annotated[str | None, Meta(
        title=_NODE, description="The node's key.", extra={"variable": "HAWKVISION_API_KEY"})] = None
    ca: Annotated[Path | None, Meta(
        title=_NODE, description="PEM file of the node's certificate authority.",
        extra={"variable": "HAWKVISION_CA"})] = None
    certificate: Annotated[Path | None, Meta(
        title=_NODE, description="PEM file of this caller's certificate and key.",
        extra={"variable": "HAWKVISION_CERTIFICATE"})] = None
    datagram: Annotated[bool, Meta(
        title=_NODE, description="Send images as datagrams, for links with packet loss.")] = False
    concurrency: Annotated[int, Meta(ge=1, le=256, title=_NODE, description="Images in flight at once.")] = 4
    out: Annotated[Path | None, Meta(
        title=_OUTPUT, description="Write a CSV file with one row per image, or per object.")] = None
    json: Annotated[bool, Meta(title=_OUTPUT, description="Print one JSON answer per line.")] = False
# fmt: on


def remember_places(given: Mapping[str, Any]) -> None:
    """Remember folders and files that were given, for command lines in messages."""
    remember(**{name: given.get(name) for name in ("models_dir", "cache_dir", "profile")})
