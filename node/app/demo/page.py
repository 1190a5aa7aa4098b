"""The page of a demo in a browser: ``tutti web`` beside its first daemon."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import webbrowser

from node.app.demo.daemons import DemoSwarm
from node.app.launch import tied
from node.reach.interfaces import free_port

WHEN = ("auto", "always", "never")
CONNECT_S = 0.1
END_S = 5.0


class DemoPage:
    """The server of the page, once it is open. ``when``: one of :data:`WHEN`."""

    def __init__(self, when: str) -> None:
        self._show = when != "never" and has_browser()
        self._serve = self._show or when == "always"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def address(self) -> str:
        """Where the page is, "" while it is not served."""
        if self._process is None:
            return ""
        return f"http://127.0.0.1:{self._port}/"

    def open(self, swarm: DemoSwarm) -> None:
        """Serve the page of the first daemon, if it is wanted."""
        if not self._serve or self._process is not None:
            return
        self._port = free_port(["127.0.0.1"])
        home = ("--home", str(swarm.home / swarm.chiefs[0].label))
        words = (*home, "web", "--port", str(self._port))
        with (swarm.home / "web.out").open("ab") as out:
            self._process = subprocess.Popen(
                tied(words), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def look(self) -> None:
        """Show the page in the browser as soon as the server listens."""
        if not self._show or self._process is None:
            return
        try:
            socket.create_connection(("127.0.0.1", self._port), CONNECT_S).close()
        except OSError:
            return
        self._show = False
        # Some browsers return only when their window is closed.
        threading.Thread(
            target=webbrowser.open, args=(self.address,), name="browser", daemon=True
        ).start()

    def close(self) -> None:
        """End the server. The page in the browser keeps what it shows."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def has_browser() -> bool:
    """Return True where a window of a browser can be opened: there is a person at a terminal, a
    display and a browser."""
    if not sys.stderr.isatty():
        return False
    display = any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"))
    if not display and sys.platform != "darwin":
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
