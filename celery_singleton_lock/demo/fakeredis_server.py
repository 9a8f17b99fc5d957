"""fakeredis as a TCP server: ``python -m celery_singleton_lock.demo.fakeredis_server``.

fakeredis 2.40 needs four corrections before Celery can use it over TCP. Each has a comment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

from fakeredis import TcpFakeServer

WRITE_TIMEOUT: Final = 20.0
"""Seconds within which a client must read a reply."""


def serve(host: str, port: int) -> None:
    """Serve until the process is killed."""

    class Server(TcpFakeServer):
        request_queue_size = 128  # with the default of 5, new clients may wait 1 s for a retry

    with Server((host, port), server_type="redis", server_version=(7, 4)) as server:
        server.RequestHandlerClass = _corrected(server.RequestHandlerClass)
        print("Ready to accept connections", flush=True)  # as in the log of a real server
        server.serve_forever()


def _corrected(handler: Any) -> Any:
    """Return fakeredis' connection handler with corrections for Celery."""

    class Handler(handler):  # type: ignore[misc]  # a private class, so it comes as a value
        disable_nagle_algorithm = True  # else a transaction waits 40 ms for a delayed ACK

        def setup(self) -> None:
            super().setup()
            # The socket does not block, so a reply larger than the send buffer would be cut.
            blocking = self.connection.dup()
            blocking.settimeout(WRITE_TIMEOUT)
            self.wfile = self.writer.writer = blocking.makefile("wb")
            blocking.close()  # the file keeps the socket open
            dump = self.writer.dump
            self.writer.dump = lambda value: dump(_on_one_line(value))
            # fakeredis closes the connection on an error reply, so the rest of a pipeline is lost.
            self.current_client.read_response = _returning_errors(self.current_client.read_response)

    return Handler


def _returning_errors(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``read`` so that it returns error replies. It still raises on a lost connection."""

    def read_response(**kwargs: Any) -> Any:
        try:
            return read(**kwargs)
        except ConnectionError:
            raise
        except Exception as error:  # any error reply of fakeredis
            if type(error).__name__ == "ConnectionError":
                raise
            return error

    return read_response


def _on_one_line(reply: Any) -> Any:
    """Return the reply, with the text of an error on one line: the protocol requires that."""
    if isinstance(reply, Exception):
        reply.args = tuple(" ".join(str(part).split()) for part in reply.args)
    return reply


def main() -> None:
    """Serve on the address of the command line."""
    parser = argparse.ArgumentParser(description="Serve fakeredis.")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    chosen = parser.parse_args()
    serve(chosen.host, chosen.port)


if __name__ == "__main__":
    main()
