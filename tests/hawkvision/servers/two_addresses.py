"""Connections of several addresses to one server, in a network namespace that has them: prints what each got."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack

from hawkvision.system.child_server import running
from tests.hawkvision.servers.impatient import PER_ADDRESS

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def main() -> None:
    with running("tests.hawkvision.servers.impatient", "0.0.0.0") as server, ExitStack() as stack:

        def asked(source: str, target: str = "192.0.2.1") -> tuple[socket.socket, bytes]:
            connection = socket.create_connection((target, server.port), 30, (source, 0))
            stack.enter_context(connection).sendall(GET)
            return connection, connection.recv(65536)

        def status(said: bytes) -> int:
            return int(said.split()[1])

        of_one = [asked("192.0.2.2") for _ in range(PER_ADDRESS)]
        _, more = asked("192.0.2.2")
        of_another = [asked("192.0.2.1") for _ in range(PER_ADDRESS)]
        of_this_machine = [asked("127.0.0.1", "127.0.0.1") for _ in range(2 * PER_ADDRESS)]
        leaving, _ = of_one[0]
        leaving.close()
        again = 429
        while again == 429:  # until the server has seen that it left
            again = status(asked("192.0.2.2")[1])
        seen = {
            "of one": [status(said) for _, said in of_one],
            "one more": [status(more), json.loads(more.partition(b"\r\n\r\n")[2])["code"]],
            "of another": [status(said) for _, said in of_another],
            "of this machine": [status(said) for _, said in of_this_machine],
            "after one has left": again,
        }
        print(json.dumps(seen))


if __name__ == "__main__":
    main()
