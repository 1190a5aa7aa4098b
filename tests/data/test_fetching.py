"""Addresses to which a manifest, a list or a redirect may lead a fetch: public ones, and hosts that
the user of this peer allows."""

import socket
from contextlib import contextmanager

import pytest

from node.core.errors import NetworkFault, UsageFault
from node.core.numbers import whole_number
from node.data.settings import NO_PLACES, OWN_MANIFEST, DataSettings, Places
from node.data.streamed import fetching, shards
from node.data.streamed.fetching import AllowedHosts, asked, host_entry, is_public, web_client
from node.data.streamed.stream import open_stream
from node.data.tokenizer import ByteTokenizer
from testbed.fakes.web_server import Answers
from tests.data.streamed import documents, published, served, stream


@contextmanager
def server(**paths):
    """A server's answers by path; yields its address and the requests it gets."""
    came = []

    def say(handler):
        came.append((handler.command, handler.path, dict(handler.headers)))
        status, headers, body = paths[handler.path.strip("/")]
        handler.close_connection = True
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body)

    with Answers(say) as found:
        yield found.base, came
        found.shutdown()


def fetched(url: str, *hosts: str) -> bytes:
    with web_client(hosts, {}) as client, asked(url, client, "GET") as answer:
        return b"".join(answer.iter_raw())


SECRET = (200, {"content-length": "6"}, b"secret")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::8.8.8.8", True),
        ("64:ff9b::127.0.0.1", False),
        ("2002:7f00:1::1", False),
        ("2002:808:808::1", True),
    ],
)
def test_an_address_is_public_or_not(address, public):
    assert is_public(address) == public


@pytest.mark.parametrize(
    ("entry", "host", "port", "address", "allowed"),
    [
        ("10.0.0.0/8", "nas.lan", 80, "10.1.2.3", True),
        ("10.0.0.0/8", "nas.lan", 80, "192.168.1.1", False),
        ("10.0.0.7", "nas.lan", 80, "10.0.0.7", True),
        ("NAS.lan", "nas.LAN", 80, "10.1.2.3", True),
        ("nas.lan", "other.lan", 80, "10.1.2.3", False),
        ("nas.lan:8000", "nas.lan", 8000, "10.1.2.3", True),
        ("nas.lan:8000", "nas.lan", 80, "10.1.2.3", False),
        ("[::1]:80", "::1", 80, "::1", True),
        ("fd00::/8", "nas.lan", 80, "fd00::1", True),
    ],
)
def test_a_user_allows_hosts_by_name_address_or_network(entry, host, port, address, allowed):
    assert AllowedHosts([entry]).allows(host, port, address) == allowed


@pytest.mark.parametrize("entry", ["", "a b", "http://host", "host:", "10.0.0.0/33", "*"])
def test_what_is_no_host_is_said(entry):
    with pytest.raises(UsageFault, match="is no host"):
        AllowedHosts([entry])


def test_an_address_of_this_machine_is_refused_until_the_user_allows_it():
    with server(secret=SECRET) as (url, came):
        with pytest.raises(UsageFault, match="is not on the public Internet") as refused:
            fetched(f"{url}/secret")
        assert not came
        assert f"--data-host {url.removeprefix('http://')}" in refused.value.next_step
        for allowed in (*host_entry(url), "127.0.0.0/8", "127.0.0.1"):
            assert fetched(f"{url}/secret", allowed) == b"secret"


@pytest.mark.parametrize("host", ["localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"])
def test_other_ways_to_write_it_are_refused_as_well(host):
    with server(secret=SECRET) as (url, came):
        port = url.rpartition(":")[2]
        with pytest.raises((UsageFault, NetworkFault)):
            fetched(f"http://{host}:{port}/secret")
        assert not came


def test_a_redirect_leads_to_no_place_of_this_machine():
    with server(secret=SECRET) as (inside, asked_inside):
        leads = (302, {"location": f"{inside}/secret", "content-length": "0"}, b"")
        with server(a=leads) as (outside, _):
            with pytest.raises(UsageFault, match="is not on the public Internet"):
                fetched(f"{outside}/a", *host_entry(outside))
            assert not asked_inside
            both = (*host_entry(outside), *host_entry(inside))
            assert fetched(f"{outside}/a", *both) == b"secret"


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("/a", "more than 5 redirects"),
        ("ftp://8.8.8.8/a", "leads to ftp:"),
        ("file:///etc/passwd", "leads to file:"),
    ],
)
def test_a_redirect_that_is_not_followed(location, says):
    with server(a=(302, {"location": location, "content-length": "0"}, b"")) as (url, came):
        with pytest.raises(UsageFault, match=says):
            fetched(f"{url}/a", *host_entry(url))
        assert len(came) <= fetching.REDIRECTS + 1


def test_the_body_of_a_redirect_is_not_read():
    # Its length is a lie: a reader that trusts it waits.
    head = {"location": "/b", "content-length": str(1 << 40), "content-encoding": "gzip"}
    with server(a=(302, head, b"x" * 100), b=SECRET) as (url, _):
        assert fetched(f"{url}/a", *host_entry(url)) == b"secret"


def test_the_asker_is_not_told_to_another_host():
    with server(secret=SECRET) as (inside, came):
        leads = (302, {"location": f"{inside}/secret", "content-length": "0"}, b"")
        with server(a=leads) as (outside, first):
            hosts = (*host_entry(outside), *host_entry(inside))
            with web_client(hosts, {"authorization": "Bearer x"}) as client:
                with asked(f"{outside}/a", client, "GET"):
                    pass
            assert {k.lower() for k in first[0][2]} >= {"authorization"}
            assert "authorization" not in {k.lower() for k in came[0][2]}


def test_a_name_is_resolved_once_and_the_checked_address_is_dialled(monkeypatch):
    """A second look at the name would give the address of this machine."""
    looked = []
    dialled = []
    real = socket.getaddrinfo

    def getaddrinfo(host, port, *what, **more):
        if host != "data.example":
            return real(host, port, *what, **more)
        address = "127.0.0.1" if looked else "8.8.8.8"
        looked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    def create_connection(address, *_, **__):
        dialled.append(address)
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    with pytest.raises(NetworkFault, match="cannot fetch"):
        fetched("http://data.example/a")
    assert (looked, dialled) == (["data.example"], [("8.8.8.8", 80)])
    with pytest.raises(UsageFault, match=r"data\.example:80 is 127\.0\.0\.1"):
        fetched("http://data.example/a")
    assert len(dialled) == 1


# ---------------------------------------------------------------- runs


@pytest.fixture
def web(tmp_path, small):
    """A server of 70 shards, more than a peer asks the sizes of."""
    texts = {f"part-{i:03}.jsonl": documents(3, i) for i in range(70)}
    with served(published(tmp_path / "web", texts).parent) as found:
        yield found


def test_the_host_of_somebody_elses_manifest_must_be_public(web, tmp_path):
    settings = DataSettings(source=f"{web.url}/part-000.jsonl", windows=4)

    def opened_with(places: Places):
        return open_stream(settings, 16, ByteTokenizer(), tmp_path, places)

    with pytest.raises(UsageFault, match="is not on the public Internet"):
        opened_with(NO_PLACES)
    assert not web.asked
    assert opened_with(Places(hosts=host_entry(web.url))).listing.shards
    assert opened_with(OWN_MANIFEST).listing.shards


@pytest.mark.parametrize("name", ["part-{000..069}.jsonl", "SHA256SUMS"])
def test_a_joiner_asks_for_few_sizes_and_for_none_that_the_manifest_has(web, tmp_path, name):
    source = f"{web.url}/{name}"
    guest = Places(hosts=host_entry(web.url))
    with pytest.raises(UsageFault, match="70 shards whose sizes the manifest does not say"):
        stream(source, tmp_path / "guest", places=guest)
    assert [m for m, *_ in web.asked].count("HEAD") == 0
    owner = stream(source, tmp_path / "owner")
    web.asked.clear()
    sizes = owner.listing.sizes
    made = stream(source, tmp_path / "guest", places=guest, sizes=sizes, sha256=owner.sha256)
    assert made.listing.shards == owner.listing.shards
    assert [m for m, *_ in web.asked].count("HEAD") == 0
    with pytest.raises(UsageFault, match="70 shards, and the manifest 69 sizes"):
        stream(source, tmp_path / "other", places=guest, sizes=sizes[1:])


def test_a_pattern_of_more_addresses_than_a_manifest_has_sizes_is_refused(tmp_path):
    last = shards.MOST_SIZED
    with pytest.raises(UsageFault, match=f"is {last + 1} shards"):
        stream(f"http://127.0.0.1:9/x-{{0..{last}}}.txt", tmp_path)


@pytest.mark.parametrize(
    "text", ["\u00b2", "\u0663", "+5", "-1", "1_0", " 7", "", "9" * 4301, "0x1"]
)
def test_a_length_that_is_no_number(text):
    """Text that int() raises for, or reads as another number than a server means."""
    assert whole_number(text) is None
    assert whole_number("0123") == 123
