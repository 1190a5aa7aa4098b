"""HTTP to addresses that a manifest, a list or a redirect names. Enters: URLs of strangers, and the
hosts that the user of this peer allows. Never: a connection to another place than the address that
was checked.

A name is resolved here, its addresses are checked, and the connection goes to one of them: a second
look at the name could give another one. Proxies of the environment are not used, for they would
resolve the name again.
"""

import contextlib
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpcore2
import httpx2

from node.core.addresses import Scope, join_host, scope
from node.core.errors import NetworkFault, UsageFault, refuse

TIMEOUT = httpx2.Timeout(30.0, connect=10.0)
"""Seconds without a byte after which a server is held to be gone."""
SLOWEST = 1024
"""Bytes a second that an answer brings on average after :data:`GRACE_S`: a server that gives a byte
now and then would keep a thread for ever."""
GRACE_S = 60.0
"""Seconds of waiting for an answer in which any speed will do."""
REDIRECTS = 5
CONNECTIONS = httpx2.Limits(max_connections=32, max_keepalive_connections=16)
_SCHEMES = ("http", "https")
# Status codes that mean more than that a server does not give a file.
FORBIDDEN = 403
CHANGED = 412
NOT_IMPLEMENTED = 501
_TRY_LATER = (408, 425, 429)
_FAILURES = (
    httpx2.HTTPError,
    httpcore2.NetworkError,
    httpcore2.TimeoutException,
    httpcore2.ProtocolError,
    httpcore2.UnsupportedProtocol,
)
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return True for an IP address that is one host of the public Internet, also behind the
    translators of IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_multicast or scope(address) is not Scope.PUBLIC:
        return False
    inner: ipaddress.IPv4Address | None = None
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return inner is None or is_public(str(inner))


class AllowedHosts:
    """Hosts outside the public Internet that the user of this peer lets data come from."""

    def __init__(self, entries: Iterable[str]) -> None:
        """``entries``: networks and addresses ("10.0.0.0/8", "::1"), and hosts with or without a
        port ("nas.lan", "127.0.0.1:8000", "[::1]:80"). Raises UsageFault for anything else."""
        self._networks = list[ipaddress.IPv4Network | ipaddress.IPv6Network]()
        self._hosts = set[tuple[str, int | None]]()
        for entry in entries:
            with contextlib.suppress(ValueError):
                self._networks.append(ipaddress.ip_network(entry, strict=False))
                continue
            found = _HOST.fullmatch(entry)
            if found is None:
                raise UsageFault(
                    f"data_hosts has {entry!r}, which is no host",
                    "give names, addresses or networks:  nas.lan, 10.0.0.7:8000, 10.0.0.0/8",
                )
            port = None
            if found[2]:
                port = int(found[2])
            self._hosts.add((found[1].strip("[]").lower(), port))

    def allows(self, host: str, port: int, address: str) -> bool:
        """Return True if ``address``, for which ``host`` stands, may be connected to."""
        names = host.strip("[]").lower()
        if is_public(address) or {(names, port), (names, None)} & self._hosts:
            return True
        ip = ipaddress.ip_address(address.partition("%")[0])
        return any(ip in network for network in self._networks)


def host_entry(url: str) -> tuple[str, ...]:
    """The host of an address as :class:`AllowedHosts` takes it; nothing for an address without
    one."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
    except ValueError:
        return ()
    if not parts.hostname:
        return ()
    return (join_host(parts.hostname, port),)


class TurnedDown(UsageFault):
    """A server turns a request down, with this ``status``."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(
            f"{url}: the server says {status}", "ask who owns the run where its data is"
        )
        self.status = status


class Forbidden(NetworkFault):
    """A server says 403: it refuses for good, or only this many requests."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url}: the server says 403", "it is asked again; it may ask for patience"
        )


class _Paced(httpcore2.NetworkStream):
    """A connection that is given up when its answers, heads included, are slower than
    :data:`SLOWEST`."""

    def __init__(self, inner: httpcore2.NetworkStream) -> None:
        self._inner = inner
        self._waited_s = 0.0
        self._came = 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        began = time.monotonic()
        found = self._inner.read(max_bytes, timeout)
        self._waited_s += time.monotonic() - began
        self._came += len(found)
        if self._came < SLOWEST * (self._waited_s - GRACE_S):
            raise httpcore2.ReadTimeout(f"less than {SLOWEST} bytes come a second")
        return found

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._waited_s = 0.0  # another request
        self._came = 0
        self._inner.write(buffer, timeout)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.NetworkStream:
        return _Paced(self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Checked(httpcore2.SyncBackend):
    """Connections to the addresses of a host that are allowed, tried one after the other."""

    def __init__(self, allowed: AllowedHosts) -> None:
        self._allowed = allowed

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.NetworkStream:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as e:
            raise httpcore2.ConnectError(f"{host} has no address: {e}") from e
        addresses = list(dict.fromkeys(str(row[4][0]) for row in found))
        usable = [a for a in addresses if self._allowed.allows(host, port, a)]
        if not usable:
            raise UsageFault(
                f"{join_host(host, port)} is {addresses[0]}, which is not on the public Internet: "
                "nothing is fetched from there",
                f"if this run's data is there, allow it here:  --data-host {join_host(host, port)}",
            )
        failure: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in usable:
            try:
                return _Paced(
                    super().connect_tcp(address, port, timeout, local_address, socket_options)
                )
            except (httpcore2.NetworkError, httpcore2.TimeoutException) as e:
                failure = e
        raise failure


class _Body(httpx2.SyncByteStream):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[bytes]:
        yield from self._inner

    def close(self) -> None:
        self._inner.close()


class _Transport(httpx2.BaseTransport):
    def __init__(self, allowed: AllowedHosts) -> None:
        self._pool = httpcore2.ConnectionPool(
            ssl_context=httpx2.create_ssl_context(),
            max_connections=CONNECTIONS.max_connections,
            max_keepalive_connections=CONNECTIONS.max_keepalive_connections,
            keepalive_expiry=CONNECTIONS.keepalive_expiry,
            network_backend=_Checked(allowed),
        )

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        answer = self._pool.handle_request(
            httpcore2.Request(
                request.method,
                httpcore2.URL(
                    scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
                ),
                headers=request.headers.raw,
                content=request.stream,
                extensions=request.extensions,
            )
        )
        return httpx2.Response(
            answer.status,
            headers=answer.headers,
            stream=_Body(answer.stream),
            extensions=answer.extensions,
        )

    def close(self) -> None:
        self._pool.close()


def web_client(hosts: Sequence[str], headers: Mapping[str, str]) -> httpx2.Client:
    """A client that connects to public addresses, and to ``hosts`` as :class:`AllowedHosts` takes
    them."""
    return httpx2.Client(
        transport=_Transport(AllowedHosts(hosts)), timeout=TIMEOUT, headers=dict(headers)
    )


@contextlib.contextmanager
def asked(
    url: str, client: httpx2.Client, method: str, headers: Mapping[str, str] | None = None
) -> Iterator[httpx2.Response]:
    """The answer of a server, its body not read yet, after at most :data:`REDIRECTS` redirects.

    Raises NetworkFault when the server does not answer, or asks for patience, Forbidden for 403,
    Turned for any other refusal, and UsageFault for an address that is not allowed; also while the
    body is read.
    """
    try:
        answer = _final(url, client, client.build_request(method, url, headers=headers))
        try:
            status = answer.status_code
            if status == FORBIDDEN:
                raise Forbidden(url)
            if status in _TRY_LATER or (status >= 500 and status != NOT_IMPLEMENTED):
                raise NetworkFault(f"{url}: the server says {status}", "it is asked again")
            if not answer.is_success:
                raise TurnedDown(url, status)
            yield answer
        finally:
            answer.close()
    except _FAILURES as e:
        raise NetworkFault(
            f"cannot fetch {url}: {e or type(e).__name__}",
            "check the network, and whether that server runs",
        ) from e
    except (httpx2.InvalidURL, UnicodeError) as e:
        raise UsageFault(f"{url} is no address: {e}", "give http://… or https://…") from e


def _final(url: str, client: httpx2.Client, request: httpx2.Request) -> httpx2.Response:
    """The first answer that is no redirect. Bodies of redirects are not read."""
    for _ in range(REDIRECTS + 1):
        refuse(
            (
                request.url.scheme not in _SCHEMES,
                f"{url} leads to {str(request.url)[:200]}",
                "data is fetched by http:// and https:// alone",
            )
        )
        answer = client.send(request, stream=True, follow_redirects=False)
        if answer.next_request is None:
            return answer
        answer.close()
        request = answer.next_request
    raise UsageFault(
        f"{url} has more than {REDIRECTS} redirects", "ask who owns the run where its data is"
    )
