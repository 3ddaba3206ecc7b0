"""The client of an edge node: send an image and what is needed of the answer, get a `hawkvision.core.types.Answer`.

    with Client("http://127.0.0.1:8080") as client:
        answer = client.classify("cat.jpg", max_accuracy_drop=0.01, deadline_ms=80)

`AsyncClient` is the implementation; `Client` runs one on an event loop of its own, so both behave alike. Images
travel unchanged, as the raw body, and fields as query parameters. A refusal is raised as the very class of
`hawkvision.core.errors` that the node raised; two more (`hawkvision.client.response`) can happen only on this side:

    ServiceError
    ├── Unreachable   no connection, a broken one, or no answer within `timeout_s`
    └── BadReply      something answered, but not in the way a node does

A call with `deadline_ms` gives up `late_s` after that deadline at the latest and raises `DeadlineMissed`, except for
`on_miss=wait`, which `timeout_s` alone bounds. After a fork a client works in the child as well, over connections of
the child's own.

With `transport="datagram"` images travel as datagrams, for links that lose some. Over a link that is known to be quick
they travel as they are, and what is lost is sent again. Elsewhere they are shrunk to what the node's models use and
coded anew (with `quality="fast"` always), and the answer says how much was received. `deadline_ms` then covers the link
both ways, from when the image begins to leave; fragments that would come too late are not sent. If too little arrives
in time for an answer, or no answer comes back, that is `DeadlineMissed` whatever `on_miss` says, except for `wait`,
which sends and waits without regard to the link's deadline.
"""

from __future__ import annotations

from hawkvision.client.asynchronous import CLASSIFY_PATH, AsyncClient, Health, Transport
from hawkvision.client.blocking import Client
from hawkvision.client.request import Image
from hawkvision.client.response import BadReply, Unreachable

__all__ = ["CLASSIFY_PATH", "AsyncClient", "BadReply", "Client", "Health", "Image", "Transport", "Unreachable"]
