"""Options that several commands share, and those of `classify`: a target, and how a node is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from hawkvision.core.advice import remember

# Servers have one option per setting; their own parsers read the words.
PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Task = Annotated[str, typer.Option(help="The task.")]


def remembered(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Remember a folder or file for command lines in messages."""
    remember(**{str(parameter.name): value})
    return value


ModelsDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of manifests; default: those of HawkVision and ~/.local/share/hawkvision/models.",
        callback=remembered,
    ),
]
CacheDir = Annotated[
    Path | None, typer.Option(help="Folder of built models; default: ~/.cache/hawkvision.", callback=remembered)
]
Profile = Annotated[Path | None, typer.Option(help="The profile; default: the task's own.", callback=remembered)]

ClassMap = Annotated[
    Path | None, typer.Option(help="File with the label or index of each class directory: DIRECTORY,LABEL a line.")
]
CleanIds = Annotated[
    Path | None,
    typer.Option(help="File with the ids of the images that no model was trained on; all others were."),
]
TrainedImages = Annotated[
    Literal["refuse", "leave-out", "fit"],
    typer.Option(help="Images that a model was trained on: refuse them, leave them out, or only fit on them."),
]

_ASK: Final = "What to ask"
_NODE: Final = "The node"
_OUTPUT: Final = "Output"

MinAccuracy = Annotated[
    float | None, typer.Option(min=0, max=1, help="At least this share of answers right.", rich_help_panel=_ASK)
]
MaxAccuracyDrop = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="At most this much less accurate than the reference stage.", rich_help_panel=_ASK),
]
Quality = Annotated[
    Literal["fast", "balanced", "best"] | None,
    typer.Option(help="A target for callers who choose no number; default: balanced.", rich_help_panel=_ASK),
]
MinConfidence = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Escalate unless this answer is this surely right.", rich_help_panel=_ASK),
]
DeadlineMs = Annotated[
    float | None,
    typer.Option(min=0, help="Milliseconds from the first byte received; default: none.", rich_help_panel=_ASK),
]
OnMiss = Annotated[
    Literal["degrade", "wait", "fail"] | None,
    typer.Option(
        help="When the deadline would pass: answer below target, wait, or fail; default: degrade.",
        rich_help_panel=_ASK,
    ),
]
Stream = Annotated[str | None, typer.Option(help="Name of the stream.", rich_help_panel=_ASK)]
TopK = Annotated[int, typer.Option(min=1, max=100, help="Classes to list in JSON.", rich_help_panel=_ASK)]
AskedTask = Annotated[str | None, typer.Option(help="The task; default: the node's.", rich_help_panel=_ASK)]

NodeUrl = Annotated[str, typer.Option(envvar="HAWKVISION_URL", help="Address of the edge node.", rich_help_panel=_NODE)]
WaitSeconds = Annotated[
    float,
    typer.Option(
        min=0,
        max=3600,
        metavar="SECONDS",
        help="Wait up to this long for a node that is starting; 0 does not wait.",
        rich_help_panel=_NODE,
    ),
]
ApiKey = Annotated[str | None, typer.Option(envvar="HAWKVISION_API_KEY", help="The node's key.", rich_help_panel=_NODE)]
Ca = Annotated[
    Path | None,
    typer.Option(envvar="HAWKVISION_CA", help="PEM file of the node's certificate authority.", rich_help_panel=_NODE),
]
Certificate = Annotated[
    Path | None,
    typer.Option(
        envvar="HAWKVISION_CERTIFICATE", help="This caller's certificate and key (PEM).", rich_help_panel=_NODE
    ),
]
CertificateKey = Annotated[
    Path | None, typer.Option(help="The certificate's key, if it is in another file.", rich_help_panel=_NODE)
]
Datagram = Annotated[
    bool,
    typer.Option("--datagram", help="Send images as datagrams, for links with packet loss.", rich_help_panel=_NODE),
]
Concurrency = Annotated[int, typer.Option(min=1, max=256, help="Images in flight at once.", rich_help_panel=_NODE)]

CsvFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write a CSV file with one row per image, or per object.", rich_help_panel=_OUTPUT
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON answer per line.", rich_help_panel=_OUTPUT)]
