"""A private stream over a relay: both ends prove their keys, and both notice an attacker in
between."""

import asyncio
import datetime
import socket
import ssl

import grpc
import grpc.aio
import pytest
from cryptography import x509

from node.core.errors import PeerFault, Refused, WireError
from node.identity.keys import Identity
from node.reach import secure
from node.reach.secure import make_certificate
from node.transport.frames import StreamEnded, read_frame, write_frame

RUN = "7" * 64
SHOWN = make_certificate()
A = Identity.ephemeral()
B = Identity.ephemeral()
MALLORY = Identity.ephemeral()


async def wires():
    """Two connected streams."""
    left, right = socket.socketpair()
    return await asyncio.open_unix_connection(sock=left), await asyncio.open_unix_connection(
        sock=right
    )


async def answer(far, callee=B, run=RUN):
    """Run the handshake as a peer does: a failed one closes the stream."""
    try:
        return await secure.answer(*far, callee, SHOWN, run)
    except BaseException:
        far[1].close()
        raise


async def meet(me=A, to=B, callee=B, run=RUN, callees_run=RUN):
    near, far = await wires()
    answering = asyncio.ensure_future(answer(far, callee, callees_run))
    try:
        async with asyncio.timeout(60):
            return await secure.call(*near, me, to.peer_id, run), await answering
    except BaseException:
        near[1].close()
        await asyncio.gather(answering, return_exceptions=True)
        raise


async def test_both_ends_know_each_other_and_talk_in_private() -> None:
    near, (peer, far) = await meet()
    assert peer == A.peer_id
    sending = asyncio.ensure_future(write_frame(near, b"secret" * 50_000))
    assert await read_frame(far, 1 << 20) == b"secret" * 50_000
    await sending
    await write_frame(far, b"answer")
    assert await read_frame(near, 100) == b"answer"


async def test_a_relay_sees_only_ciphertext_and_cannot_alter_it() -> None:
    near, near_relay = await wires()
    far_relay, far = await wires()
    seen = bytearray()
    spoil = asyncio.Event()

    async def carry(source, sink, flip: bool) -> None:
        while piece := await source.read(1 << 16):
            seen.extend(piece)
            if flip and spoil.is_set():
                piece = bytes([piece[0] ^ 1]) + piece[1:]
            sink.write(piece)

    tasks = [
        asyncio.ensure_future(carry(near_relay[0], far_relay[1], True)),
        asyncio.ensure_future(carry(far_relay[0], near_relay[1], False)),
    ]
    answering = asyncio.ensure_future(answer(far))
    mine = await secure.call(*near, A, B.peer_id, RUN)
    _, theirs = await answering
    await write_frame(mine, b"the token")
    assert await read_frame(theirs, 100) == b"the token"
    assert b"the token" not in seen
    assert A.public not in seen, "who calls is not for the relay to read here"
    spoil.set()
    await write_frame(mine, b"more")
    with pytest.raises(StreamEnded):  # which counts against nobody
        await asyncio.wait_for(read_frame(theirs, 100), 60)
    for task in tasks:
        task.cancel()


async def test_somebody_else_at_the_other_end_is_noticed() -> None:
    with pytest.raises((PeerFault, Refused)):
        await meet(callee=MALLORY)
    posing = Identity(MALLORY._key, None)
    posing.peer_id = B.peer_id
    with pytest.raises(PeerFault, match="somebody else answers"):
        await meet(callee=posing)
    posing.peer_id = A.peer_id
    with pytest.raises(PeerFault):
        await meet(me=posing)


async def test_a_relay_that_ends_tls_towards_both_is_noticed_by_both() -> None:
    """Mallory holds a TLS session with each end and passes on their signatures."""
    near, toward_a = await wires()
    toward_b, far = await wires()
    own = make_certificate()

    async def between() -> None:
        as_b = secure.Secured(*toward_a, secure._server(own.pem, own.key), server=True)
        as_a = secure.Secured(*toward_b, secure._client(), server=False)
        await asyncio.gather(as_b.shake(), as_a.shake())
        as_b.write(await as_a.readexactly(secure.NONCE_BYTES))
        await as_b.drain()
        as_a.write(await as_b.readexactly(32 + secure._PROOF.size))
        await as_a.drain()
        as_b.write(await as_a.readexactly(64))
        await as_b.drain()

    middle = asyncio.ensure_future(between())
    answering = asyncio.ensure_future(answer(far))
    calling = asyncio.ensure_future(secure.call(*near, A, B.peer_id, RUN))
    with pytest.raises(Refused):
        await asyncio.wait_for(answering, 60)
    await asyncio.gather(middle, return_exceptions=True)
    toward_a[1].close()
    with pytest.raises(PeerFault):
        await asyncio.wait_for(calling, 60)


async def test_a_stream_that_breaks_off_is_a_fault_of_the_peer() -> None:
    left, right = socket.socketpair()
    near = await asyncio.open_unix_connection(sock=left)
    near[1].write(b"not read, so closing the other end resets the stream")
    right.close()
    with pytest.raises(PeerFault, match="no private connection"):
        await secure.call(*near, A, B.peer_id, RUN)
    near[1].close()


async def test_another_run_is_another_world() -> None:
    with pytest.raises((PeerFault, Refused)):
        await meet(callees_run="8" * 64)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", bytes(5000)])
async def test_nonsense_is_a_wire_error(said: bytes) -> None:
    near, far = await wires()
    near[1].write(said)
    near[1].write_eof()
    with pytest.raises(WireError):
        await asyncio.wait_for(secure.answer(*far, B, SHOWN, RUN), 60)


def test_a_certificate_holds_at_any_time() -> None:
    """A daemon may run for years, or begin with a clock that is years off."""
    made = x509.load_pem_x509_certificate(make_certificate().pem)
    assert made.not_valid_before_utc <= datetime.datetime.fromtimestamp(0, datetime.UTC)
    # RFC 5280, 4.1.2.5: no well-defined expiration
    assert made.not_valid_after_utc == datetime.datetime(9999, 12, 31, 23, 59, 59, 0, datetime.UTC)


async def test_a_certificate_without_an_end_is_accepted_by_grpc_and_by_python() -> None:
    async def echo(request: bytes, context: object) -> bytes:
        return request

    server = grpc.aio.server()
    methods = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Any", methods),))
    own = grpc.ssl_server_credentials([(SHOWN.key, SHOWN.pem)])
    port = server.add_secure_port("127.0.0.1:0", own)
    await server.start()
    try:
        pinned = grpc.ssl_channel_credentials(SHOWN.pem)
        name = [("grpc.ssl_target_name_override", SHOWN.name)]
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", pinned, name) as channel:
            assert await channel.unary_unary("/test.Any/Echo")(b"hello", timeout=10) == b"hello"
        context = ssl.create_default_context(cadata=SHOWN.pem.decode())
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=SHOWN.name
        )
        writer.close()
    finally:
        await server.stop(None)
