"""Web servers on loopback: one of a directory, which gives parts of files and says their versions,
and one whose answers a test writes.

python -m testbed.fakes.web_server DIRECTORY --port 8080
"""

import argparse
import re
import threading
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_STEP = 1 << 16


class FileServer(ThreadingHTTPServer):
    """``down``: answers 503; ``cut``: bytes after which a body ends, 0 for none; ``parts``: whether
    ranges are given; ``asked``: (method, path, range) of every request."""

    daemon_threads = True

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.directory = directory
        self.down = False
        self.cut = 0
        self.parts = True
        self.asked: list[tuple[str, str, str]] = []
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(ThreadingHTTPServer):
    """Server that answers every request by ``say(handler)``, on a thread of its own. ``base``: its
    address; ``url``: that of a file there; ``headers``: headers of every request, in order."""

    daemon_threads = True

    def __init__(self, say: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.headers: list[Message] = []
        heard = self.headers

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                heard.append(self.headers)
                say(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        self.base = f"http://127.0.0.1:{self.server_port}"
        self.url = f"{self.base}/a.txt"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        server = self.server
        wanted = self.headers.get("range", "")
        assert isinstance(server, FileServer)
        server.asked.append((self.command, self.path, wanted))
        path = server.directory / self.path.partition("?")[0].lstrip("/")
        if server.down or not path.is_file():
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE if server.down else HTTPStatus.NOT_FOUND)
            return
        stat = path.stat()
        tag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
        if self.headers.get("if-match", tag) != tag:
            self.send_error(HTTPStatus.PRECONDITION_FAILED)
            return
        start = 0
        stop = stat.st_size
        found = _RANGE.fullmatch(wanted) if server.parts else None
        if found and self.headers.get("if-range", tag) == tag:
            start = int(found[1])
            stop = min(stop, int(found[2] or stop) + 1)
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("content-range", f"bytes {start}-{stop - 1}/{stat.st_size}")
        else:
            self.send_response(HTTPStatus.OK)
        self.send_header("content-length", str(stop - start))
        self.send_header("etag", tag)
        self.end_headers()
        if body:
            self._send(path, start, stop, server.cut)

    def _send(self, path: Path, start: int, stop: int, cut: int) -> None:
        left = stop - start
        if 0 < cut < left:
            left = cut
            self.close_connection = True
        with open(path, "rb") as file:
            file.seek(start)
            while left and (piece := file.read(min(_STEP, left))):
                left -= len(piece)
                try:
                    self.wfile.write(piece)
                except OSError:
                    self.close_connection = True
                    return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args()
    FileServer(asked.directory.resolve(), asked.port).serve_forever()


if __name__ == "__main__":
    main()
