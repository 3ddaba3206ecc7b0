"""KServe's Python SDK: one process, protocol v1, whose predict route hands bodies that are not JSON to the model whole.

Its Open Inference server (v2) cannot take a JPEG over HTTP: it decodes BYTES tensors as UTF-8.
"""

from __future__ import annotations

import logging
from typing import Any

import kserve  # type: ignore[import-not-found,import-untyped,unused-ignore]

from tests.bench.servers.handlers import work


class Model(kserve.Model):  # type: ignore[misc,unused-ignore]
    """One model, called on the event loop, which has nothing better to do on this core."""

    def __init__(self) -> None:
        super().__init__("classify")
        self.classify = work.classifier()
        self.ready = True

    async def predict(self, payload: bytes, *_: Any, **__: Any) -> dict[str, int]:
        """The JPEG is the payload."""
        return {"index": self.classify(payload)}


if __name__ == "__main__":
    server = kserve.ModelServer(http_port=work.port(), enable_grpc=False, workers=1, enable_latency_logging=False)
    # Made by the constructor: a line of access log and two of timings per request.
    for name in ("kserve.trace", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.ERROR)
    server.start([Model()])
