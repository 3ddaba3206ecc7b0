"""BentoML: one worker, the JPEG as root input in bytes, an async method (no thread hand-off), no batching."""

# No `from __future__ import annotations` here: BentoML reads the annotations as they are.
from typing import Any

import bentoml  # type: ignore[import-not-found,import-untyped,unused-ignore]
from starlette.responses import Response

from tests.bench.servers.handlers import work


@bentoml.service(workers=1, metrics={"enabled": True}, logging={"access": {"enabled": False}})  # type: ignore[untyped-decorator,unused-ignore]
class Classifier:
    """The service that `bentoml serve` starts."""

    def __init__(self) -> None:
        self.classify = work.classifier()

    @bentoml.api(route="/classify")  # type: ignore[untyped-decorator,unused-ignore]
    async def answer(self, image: bytes, /) -> Any:
        """The JPEG is the body. It answers with a response ready made, which spares it a second schema."""
        return Response(b'{"index":%d}' % self.classify(image), media_type="application/json")
