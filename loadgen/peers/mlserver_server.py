"""MLServer: in process (no parallel workers: there is one core), a custom handler on the raw body.

Its Open Inference door refuses binary tensors and takes pictures as base64 in JSON only; the custom handler, its own
documented way of taking other bodies, spares it both.
"""

from __future__ import annotations

import asyncio

import mlserver  # type: ignore[import-not-found,import-untyped,unused-ignore]
from fastapi import Request, Response
from mlserver.handlers import custom_handler  # type: ignore[import-not-found,import-untyped,unused-ignore]

from loadgen.peers import work


class Model(mlserver.MLModel):  # type: ignore[misc,unused-ignore]
    """One model, called on the event loop, which has nothing better to do on this core."""

    async def load(self) -> bool:
        """Load it."""
        self.classify = work.classifier()
        return True

    @custom_handler(rest_path="/classify")  # type: ignore[untyped-decorator,unused-ignore]
    async def answer(self, request: Request) -> Response:
        """The JPEG is the body."""
        index = self.classify(await request.body())
        return Response(b'{"index":%d}' % index, media_type="application/json")


async def main() -> None:
    """Serve until told to stop."""
    settings = mlserver.Settings(
        host="127.0.0.1",
        http_port=work.port(),
        # The other doors take any port, so that two of these may run side by side.
        grpc_port=0,
        metrics_port=0,
        parallel_workers=0,
        gzip_enabled=False,
        debug=False,
    )
    model = mlserver.ModelSettings(name="classify", implementation=Model)
    await mlserver.MLServer(settings).start(models_settings=[model])


if __name__ == "__main__":
    asyncio.run(main())
