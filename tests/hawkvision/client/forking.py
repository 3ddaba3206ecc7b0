"""forking.py URL TRANSPORT: a client made and used before `os.fork`, then used on both sides; prints what each got."""

from __future__ import annotations

import os
import signal
import sys

from hawkvision.client.blocking import Client
from tests.images import encoded

IMAGE = encoded()


def main(url: str, transport: str) -> None:
    client = Client(url, transport=transport, timeout_s=20.0)  # type: ignore[arg-type]
    print("before:", client.classify(IMAGE, quality="fast").tier.value, flush=True)
    for _ in range(2):
        if os.fork() == 0:
            signal.alarm(60)  # ends a child that hangs
            print("child:", client.classify(IMAGE, quality="fast").tier.value, flush=True)
            client.close()
            os._exit(0)
        print("status:", os.wait()[1], flush=True)
        print("parent:", client.classify(IMAGE, quality="fast").tier.value, flush=True)
    if os.fork() == 0:
        signal.alarm(60)
        client.close()  # without having used it
        try:
            client.health()
        except RuntimeError as error:
            print("closed:", error, flush=True)
        os._exit(0)
    print("status:", os.wait()[1], flush=True)
    print("parent:", client.classify(IMAGE, quality="fast").tier.value, flush=True)
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
