"""The routes of review: what waits for a label, its image, labels, and the certificates made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.monitoring.labelling import Block, NewCertificates, Review, Reviewer, ReviewItem, ReviewQuery, Task
from edge.servers.shared.frontend import Frontend
from edge.servers.shared.page_messages import Given, fresh_image, fresh_json, query_of
from hawkvision.core.errors import MALFORMED, BadField, NotFound, TooLarge
from hawkvision.core.escalation_api import CERTIFICATES_PATH

REVIEW_PATH: Final = "/v1/review"
MOST_BODY_BYTES: Final = 65_536
"""A set of all labels of COCO has 1 kB."""


class _OfTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of a path about one image."""

    task: Task = None


class LabelBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A label."""

    label: Annotated[
        Any,
        Meta(
            description="One of the image's `choices`; or the name or index of a class; a number, or "
            "`{group: number}`, or `{region: {group: number}}`, for counts; a list of names for sets of labels."
        ),
    ]


class CertificatesBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to make certificates of."""

    task: Task = None
    block: Block = None
    labels_checked: Annotated[
        bool,
        Meta(
            description="Somebody looked again at the labels of the images drawn at random, and they are right "
            "although the reference stage is right less often there than in its profile."
        ),
    ] = False


OPERATIONS: Final = (
    ("get", REVIEW_PATH, "What people may label, and what that certifies", "review", ReviewQuery, None, Review),
    ("get", f"{REVIEW_PATH}/{{id}}/image", "An image to label", "reviewImage", _OfTask, None, None),
    ("post", f"{REVIEW_PATH}/{{id}}", "Label an image", "label", _OfTask, LabelBody, ReviewItem),
    ("delete", f"{REVIEW_PATH}/{{id}}", "Take a label back", "unlabel", _OfTask, None, ReviewItem),
    (
        "post", CERTIFICATES_PATH, "Make certificates of the node's audits and put them in force", "certify", None,
        CertificatesBody, NewCertificates,
    ),
)  # fmt: skip
"""Method, path, summary, name, and the types of query, body and answer, for the description of the API."""


def reviewers(frontend: Frontend) -> Callable[[str | None], Reviewer]:
    """The review of each task of a node; None is the first."""

    def reviewer(task: str | None) -> Reviewer:
        node = frontend.ready_tasks().node(task)
        if node.reviewer is None:
            raise NotFound(f"task {node.task!r} has no audits: this node has no datacenter, or another policy")
        return node.reviewer

    return reviewer


def routes(reviewer: Callable[[str | None], Reviewer]) -> list[Route]:
    """The routes, for the review of each task."""

    async def show(request: Request) -> Response:
        asked = query_of(request, ReviewQuery)
        return fresh_json(await reviewer(asked.task).show(asked))

    async def image(request: Request) -> Response:
        return fresh_image(await reviewer(query_of(request, _OfTask).task).image(_item(request)))

    async def label(request: Request) -> Response:
        review, item = reviewer(query_of(request, _OfTask).task), _item(request)
        if request.method == "DELETE":
            return fresh_json(await review.label(item, None))
        said = (await _body(request, LabelBody)).label
        if said is None:
            raise BadField("label: expected one; DELETE takes a label back")
        return fresh_json(await review.label(item, said))

    async def certify(request: Request) -> Response:
        asked = await _body(request, CertificatesBody)
        return fresh_json(await reviewer(asked.task).certify(asked.block, labels_checked=asked.labels_checked))

    one = f"{REVIEW_PATH}/{{id}}"
    return [
        Route(REVIEW_PATH, show, methods=["GET"]),
        Route(f"{one}/image", image, methods=["GET"]),
        Route(one, label, methods=["POST", "DELETE"]),
        Route(CERTIFICATES_PATH, certify, methods=["POST"]),
    ]


def _item(request: Request) -> str:
    item: str = request.path_params["id"]
    return item


async def _body(request: Request, declared: type[Given]) -> Given:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise TooLarge(f"the body has more than {MOST_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(body or b"{}", type=declared)
    except MALFORMED as error:
        raise BadField(f"body: {error}") from None
