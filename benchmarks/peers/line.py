"""Lines of a given speed in front of members of a cell: a relay of TCP connections, as a process of
its own.

    python -m benchmarks.peers.line MBIT FROM:TO [FROM:TO ...]

Whoever connects to port FROM of loopback talks to port TO; each direction of each connection
carries MBIT million bits a second.
"""

import contextlib
import socket
import sys
import threading
import time

PIECE = 1 << 16
AHEAD_S = 0.02
"""Seconds of traffic that a line may carry at once after a pause: sleeping is no more exact than
this on a busy machine."""


def main() -> None:
    """Relay until stdin ends."""
    rate = float(sys.argv[1]) * 1e6 / 8
    for pair in sys.argv[2:]:
        near, far = map(int, pair.split(":"))
        listener = socket.create_server(("127.0.0.1", near))
        threading.Thread(target=_accept, args=(listener, far, rate), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


def _accept(listener: socket.socket, far: int, rate: float) -> None:
    while True:
        here, _ = listener.accept()
        try:
            there = socket.create_connection(("127.0.0.1", far))
        except OSError:
            here.close()
            continue
        for a, b in ((here, there), (there, here)):
            threading.Thread(target=_carry, args=(a, b, rate), daemon=True).start()


def _carry(a: socket.socket, b: socket.socket, rate: float) -> None:
    free = time.monotonic()
    with contextlib.suppress(OSError):
        while data := a.recv(PIECE):
            b.sendall(data)
            now = time.monotonic()
            free = max(free, now - AHEAD_S) + len(data) / rate
            if free > now:
                time.sleep(free - now)
        b.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
