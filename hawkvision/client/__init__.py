"""The client of an edge node.

    with Client("http://127.0.0.1:8080") as client:
        answer = client.classify("cat.jpg", max_accuracy_drop=0.01, deadline_ms=80)
        found = client.detect("street.jpg").prediction.objects

`AsyncClient` is the implementation. `Client` runs one on its own event loop, so both behave alike. Images are sent
unchanged as the body, fields as query parameters. An error of the node is raised as the class with its `code`. Two
more errors arise only in the client:

    ServiceError
    ├── Unreachable   no connection, a broken one, or no reply within `timeout_s`
    └── BadReply      the reply is not that of a node

A call with `deadline_ms` raises `DeadlineMissed` at the latest `late_s` after the deadline. With `on_miss=wait`, and
over HTTP with `on_miss=degrade` unless `late_s` is given, only `timeout_s` applies. After a fork a client also works in
the child, over new connections.

With `transport="datagram"` images travel as datagrams, for links with packet loss. An image is sent unchanged if the
link is known to be fast and its losses can be repaired in time. Otherwise it is reduced to what the node's models use
and encoded again (always for `quality="fast"`); the answer states what was received. `deadline_ms` covers the link in
both directions, from the first datagram on, and fragments that would arrive too late are not sent. If too little
arrives in time, or no answer comes back, the call raises `DeadlineMissed`, except with `on_miss=wait`.
"""

from __future__ import annotations

from hawkvision.client.asynchronous import AsyncClient, Health, Transport
from hawkvision.client.blocking import Client
from hawkvision.client.request import Image
from hawkvision.client.response import BadReply, OtherPrediction, Unreachable
from hawkvision.tasks.registry import CLASSIFY_PATH

__all__ = [
    "CLASSIFY_PATH",
    "AsyncClient",
    "BadReply",
    "Client",
    "Health",
    "Image",
    "OtherPrediction",
    "Transport",
    "Unreachable",
]
