"""The HTTP server as an ASGI application.

`POST /v1/infer`, its typed forms (`/v1/classify`, `/v1/detect`, …), and inference by the Open Inference Protocol are
plain ASGI. Everything else is Starlette (`edge.servers.info_routes`). Every error leaves as `{"error", "code"}` with
its status. Bounds: bodies as in `hawkvision.servers.bodies`, and at most `max_queue` waiting images.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import msgspec
from starlette.types import Message, Receive, Scope, Send

from edge.servers import deepstack
from edge.servers.comparison import MOST_AT_ONCE, compare
from edge.servers.forms import check_form, is_form, read_form
from edge.servers.gate import LOCAL
from edge.servers.info_routes import CALLER, pages
from edge.servers.oip import routes as oip_routes
from edge.servers.shared.frontend import Frontend
from edge.servers.shared.http_messages import (
    Answered,
    Handler,
    Headers,
    Reply,
    encode,
    error_headers,
    error_reply,
    header,
    name_request,
    read_body,
    reply_of,
    send_reply,
    server_timing,
)
from edge.servers.shared.request_fields import parse_request, read_headers, read_query, read_request
from edge.serving.node import EdgeNode
from edge.serving.request import ImageRequest
from edge.serving.tasks import ServedTasks
from hawkvision.core.errors import (
    HawkVisionError,
    MethodNotAllowed,
    NotReady,
    Overloaded,
    UnsupportedMedia,
)
from hawkvision.core.escalation_api import COMPARE_PATH
from hawkvision.core.trace_context import TraceContext
from hawkvision.core.types import RequestFields
from hawkvision.servers.bodies import Body, CallerGone
from hawkvision.servers.connections import PLACE, waited_s
from hawkvision.servers.keys import INFER, OPEN_PATHS, OPERATE, Scopes, needed_scopes
from hawkvision.tasks.registry import CLASSIFY_PATH, DEEPSTACK_PATH, DETECT_PATH, INFER_PATH, KIND_OF_FORM

TASK: Final = "hawkvision.task"
"""Key of the task in a request's scope, once it is known."""

_NOT_IMAGES: Final = ("application/json", "text/", "application/xml", "video/", "audio/")


class HttpApp:
    """The HTTP adapter of a node's front end. Serves health at once, and everything else once that is ready."""

    def __init__(self, frontend: Frontend, *, page: bool = True) -> None:
        """Serve this front end, with or without the page at `/`."""
        self._front = frontend
        self._rest = pages(frontend, page=page)
        self._comparing = 0
        """Images that are compared."""
        self._handlers: dict[str, Handler] = {
            INFER_PATH: partial(self._answer_image, None),
            CLASSIFY_PATH: partial(self._answer_image, KIND_OF_FORM[CLASSIFY_PATH]),
            DETECT_PATH: partial(self._answer_image, KIND_OF_FORM[DETECT_PATH]),
            COMPARE_PATH: self._compare,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        path: str = scope["path"]
        handler = self._handlers.get(path)
        if handler is None and oip_routes.is_infer(path):
            handler = self._infer
        if handler is None and deepstack.takes_form(path):
            handler = self._answer_deepstack
        if handler is not None:
            await send_reply(send, await self._answered(handler, scope, Body(self._front.bodies, receive)))
            return
        _, named = name_request(scope["headers"])

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *named]
            await send(message)

        try:
            if path not in OPEN_PATHS:
                scope[CALLER] = self._authorize(scope, needed_scopes(scope["method"], path))
        except HawkVisionError as error:
            await send_reply(send_named, error_reply(error, []))
            return
        await self._rest(scope, receive, send_named)

    async def _answered(self, handler: Handler, scope: Scope, body: Body) -> Reply | None:
        """The response to one request for answers or to its error; None if the caller is gone."""
        front = self._front
        started = front.clock.now() - waited_s(scope)
        trace, headers = name_request(scope["headers"])
        front.in_flight += 1
        try:
            if scope["method"] != "POST":
                raise MethodNotAllowed(f"{scope['path'][:100]} takes POST, not {scope['method']}")
            needed = OPERATE if scope["path"] == COMPARE_PATH else INFER
            # DeepStack's callers send their key in the form.
            caller = "" if handler == self._answer_deepstack else self._authorize(scope, needed)
            answered = await handler(front.ready_tasks(), scope, body, started, trace, caller)
        except asyncio.CancelledError:  # a stopping server cancels this task, which ends here anyway
            stopped = NotReady("the node had to stop before it could answer")
            return self._refusal(stopped, scope, started, headers)
        except Exception as error:  # noqa: BLE001 - a server: every error leaves as a documented body
            return self._refusal(error, scope, started, headers)
        finally:
            if (place := scope.get(PLACE)) is not None:
                place.release()
            body.release()
            front.in_flight -= 1
        for answer in answered.answers:
            front.count(answer)
        headers += answered.headers
        return reply_of(200, answered.body, headers, answered.media_type)

    async def _answer_image(
        self,
        kind: str | None,
        tasks: ServedTasks,
        scope: Scope,
        body: Body,
        started: float,
        trace: TraceContext,
        caller: str,
    ) -> Answered:
        node, image, asked = await self._read(kind, tasks, scope, body, started, caller)
        answer = await node.infer(
            ImageRequest(image, asked, started, trace, caller, hang_up=body.hang_up, place=scope.get(PLACE))
        )
        return Answered((answer,), encode(answer.to_json()), [(b"server-timing", server_timing(answer.timing_ms))])

    async def _compare(
        self, tasks: ServedTasks, scope: Scope, body: Body, started: float, trace: TraceContext, caller: str
    ) -> Answered:
        node, image, asked = await self._read(None, tasks, scope, body, started, caller)
        if self._comparing >= MOST_AT_ONCE:
            raise Overloaded(f"{self._comparing} images are already being compared", 1.0)
        self._comparing += 1
        try:
            found = await compare(node, ImageRequest(image, asked, started, trace, caller))
        finally:
            self._comparing -= 1
        return Answered((), msgspec.json.encode(found), [])

    async def _infer(
        self, tasks: ServedTasks, scope: Scope, body: Body, started: float, trace: TraceContext, caller: str
    ) -> Answered:
        node = self._chosen(tasks, oip_routes.asked_task(scope["path"], tasks), None, scope, body)
        return await oip_routes.infer(
            node, scope, body, started, trace, caller, max_body_bytes=self._front.bodies.max_body_bytes
        )

    async def _answer_deepstack(
        self, tasks: ServedTasks, scope: Scope, body: Body, started: float, trace: TraceContext, caller: str
    ) -> Answered:
        """See `edge.servers.deepstack`; `caller` is not known yet."""
        headers, keys = scope["headers"], self._front.keys
        keyed = header(headers, b"authorization") is not None or not keys.required
        if keyed:
            caller = self._authorize(scope, INFER)
        else:
            deepstack.check_unkeyed(header(headers, b"content-length"), keys)
        content_type = header(headers, b"content-type") or ""
        check_form(content_type)
        data = await read_body(body, headers, self._front.bodies.max_body_bytes if keyed else deepstack.UNKEYED_BYTES)
        image, fields = await read_form(content_type, data)
        request, least, most, authorization = deepstack.parse(scope["path"], read_query(scope["query_string"]), fields)
        if not keyed:
            caller = self._authorize(scope, INFER, authorization)
        node = self._chosen(tasks, request.task, KIND_OF_FORM[DEEPSTACK_PATH], scope, body)
        answer = await node.infer(ImageRequest(image, request, started, trace, caller, hang_up=body.hang_up))
        return Answered((answer,), encode(deepstack.reply(answer, image, least, most)), [])

    def _chosen(self, tasks: ServedTasks, task: str | None, kind: str | None, scope: Scope, body: Body) -> EdgeNode:
        """The node of the task that a request names; the body counts among those of this task.

        Raises:
            NotFound, BadField, NotReady: as `ServedTasks.node`.
            Overloaded: if the bodies of the task take all of their memory.
        """
        node = tasks.node(task, kind)
        scope[TASK] = node.task
        body.count_in(self._front.bodies_of(node.task))
        return node

    async def _read(
        self, kind: str | None, tasks: ServedTasks, scope: Scope, body: Body, started: float, caller: str
    ) -> tuple[EdgeNode, bytes, RequestFields]:
        """The node of the request's task, the image, and the request, from query, headers or a form."""
        raw_headers = scope["headers"]
        ours = tuple(entry for entry in raw_headers if entry[0].startswith(b"x-hawkvision-"))
        content_type = header(raw_headers, b"content-type") or ""
        limit = self._front.bodies.max_body_bytes
        if is_form(content_type):
            image, fields = await read_form(content_type, await read_body(body, raw_headers, limit))
            request = parse_request(read_query(scope["query_string"]) + read_headers(ours) + fields)
            return self._chosen(tasks, request.task, kind or request.kind, scope, body), image, request
        if content_type.lower().startswith(_NOT_IMAGES):
            raise UnsupportedMedia(
                f"Content-Type {content_type[:60]!r}: send the image itself (JPEG, PNG or WebP) as the body, "
                "or a multipart form with the image in 'image'"
            )
        request = read_request(scope["query_string"], ours)
        node = self._chosen(tasks, request.task, kind or request.kind, scope, body)
        if not node.may_ask_datacenter(request) and PLACE not in scope:
            node.pool.check(caller, request.promised(started))
        return node, await read_body(body, raw_headers, limit), request

    def _authorize(self, scope: Scope, needed: Scopes, authorization: str | None = None) -> str:
        """The caller, by the header Authorization or by `authorization`, which stands for one."""
        if not self._front.keys.required:
            self._front.browsers.check(scope["headers"])
        client = scope.get("client")
        address = client[0] if client else LOCAL
        return self._front.authorize(authorization or header(scope["headers"], b"authorization"), address, needed)

    def _refusal(self, error: Exception, scope: Scope, started: float, headers: Headers) -> Reply | None:
        if isinstance(error, CallerGone):
            return None
        refused = self._front.refusal(error, scope.get(TASK))
        total_ms = (self._front.clock.now() - started) * 1e3
        headers += [*error_headers(refused), (b"server-timing", b"total;dur=%.3f" % total_ms)]
        body = refused.body()
        if deepstack.takes_form(scope["path"]):
            body = deepstack.refused(body)
        return reply_of(refused.status, encode(body), headers)
