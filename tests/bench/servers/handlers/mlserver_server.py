"""MLServer: in process (no parallel workers: there is one core), asked in two ways.

Its Open Inference server refuses binary tensors and takes images as base64 in JSON only. A custom handler, its own
documented way of taking other bodies, spares it both, and its request pipeline too: it is the fastest it can be.
"""

from __future__ import annotations

import asyncio

import mlserver  # type: ignore[import-not-found,import-untyped,unused-ignore]
from fastapi import Request, Response
from mlserver.codecs import Base64Codec  # type: ignore[import-not-found,import-untyped,unused-ignore]
from mlserver.handlers import custom_handler  # type: ignore[import-not-found,import-untyped,unused-ignore]
from mlserver.types import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    InferenceRequest,
    InferenceResponse,
    ResponseOutput,
)

from tests.bench.servers.handlers import work


class Model(mlserver.MLModel):  # type: ignore[misc,unused-ignore]
    """One model, called on the event loop, which has nothing better to do on this core."""

    async def load(self) -> bool:
        """Load it."""
        self.classify = work.classifier()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Open Inference Protocol: the JPEG is the one base64 element of the one input."""
        (jpeg,) = Base64Codec.decode_input(payload.inputs[0])
        output = ResponseOutput(name="index", shape=[1], datatype="INT32", data=[self.classify(jpeg)])
        return InferenceResponse(model_name=self.name, outputs=[output])

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
        # The other servers take any port, so that two of these may run side by side.
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
