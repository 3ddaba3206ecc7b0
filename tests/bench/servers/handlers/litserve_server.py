"""LitServe: one worker process and one HTTP thread, joined by its default queue, no batching.

Its fast queue (ZeroMQ) gave 155 answers a second on an idle machine, but stalled for seconds in two starts of three on
a busy one (3 to 10 answers a second, its processes idle), where the default gave 144. An HTTP thread gave 139 answers
per CPU second, an HTTP process 133.
"""

# No `from __future__ import annotations` here: LitServe hands the annotation of `decode_request` to FastAPI as it is.
from typing import Annotated, Any

import litserve  # type: ignore[import-not-found,import-untyped,unused-ignore]
from fastapi import Body

from tests.bench.servers.handlers import work


class Api(litserve.LitAPI):  # type: ignore[misc,unused-ignore]
    """The JPEG is the body itself: FastAPI gives bytes where a body of another type than JSON is declared as such."""

    def setup(self, device: str) -> None:
        """Load the model, in the worker."""
        self.classify = work.classifier()

    def decode_request(self, request: Annotated[bytes, Body(media_type="image/jpeg")]) -> bytes:
        """The body, unread."""
        return request

    def predict(self, jpeg: bytes) -> int:
        """All the work."""
        return self.classify(jpeg)

    def encode_response(self, output: int) -> dict[str, Any]:
        """What the harness reads."""
        return {"index": output}


if __name__ == "__main__":
    server = litserve.LitServer(Api(), accelerator="cpu", devices=1, workers_per_device=1, fast_queue=False)
    server.run(
        host="127.0.0.1",
        port=work.port(),
        num_api_servers=1,
        api_server_worker_type="thread",
        log_level="warning",
        generate_client_file=False,
        access_log=False,
    )
