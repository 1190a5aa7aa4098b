"""TLS over a byte stream that a stranger carries, with both ends proven by their identity keys; and
the certificate that a peer shows there and on its gRPC server.
Enters: a stream through a relay. Leaves: the same stream, private, and the PeerId at its other end.
Never: trust in the relay, which sees only when and how much.

The server's certificate alone proves nothing: the relay that carries the stream can show one of its
own. So inside TLS each side signs its view of the session: the run, both PeerIds, the server's
certificate and a nonce of the other side. A relay that ends TLS itself, towards either side, gets a
signature over its own certificate, which the other side refuses.

Nobody signs a certificate and nobody needs to. For gRPC the handshake delivers it over a connection
that proves the PeerId, and a client accepts exactly this one. P-256 because gRPC's TLS has no
Ed25519.
"""

import asyncio
import datetime
import hashlib
import secrets
import ssl
import struct
import tempfile
from dataclasses import dataclass
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from node.core.errors import PeerFault, Refused, WireError
from node.core.ids import PeerId
from node.identity.keys import KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify

NONCE_BYTES = 32
PIECE = 1 << 16
"""Bytes read from the stream at once."""
HELD = 1 << 20
"""Bytes of TLS records that may wait for their reader."""
CERTIFICATE_BYTES = 4096
BEGIN = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
"""Begin of a certificate's validity: the time that a machine without a battery for its clock begins
with. A certificate is pinned and lives as long as its process, so its dates say nothing, but TLS
compares them with the clock: a process that runs for years, or began with a wrong clock, must be
called all the same."""
NO_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""End of a certificate's validity: none (RFC 5280, 4.1.2.5)."""
_CALLER = "tutti/relayed/caller/1"
_CALLEE = "tutti/relayed/callee/1"
_PROOF = struct.Struct(f">{NONCE_BYTES}s{SIGNATURE_BYTES}s")
_USAGE = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class ServerCertificate:
    """``pem`` is shown, ``key`` (PEM) stays in memory, ``name`` is the DNS name a client must
    expect."""

    key: bytes
    pem: bytes
    name: str

    @property
    def digest(self) -> bytes:
        """sha256 of the certificate, DER."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.pem.decode("ascii"))).digest()


class Secured:
    """A TLS connection over ``reader`` and ``writer``; read and written as both."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        context: ssl.SSLContext,
        server: bool,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)

    async def shake(self) -> None:
        """The TLS handshake. Raises WireError when it fails or the stream ends."""
        while True:
            try:
                self._tls.do_handshake()
                await self._flush()
                return
            except ssl.SSLWantReadError:
                await self._more()
            except ssl.SSLError as e:
                raise WireError(f"TLS failed: {e.reason or e}") from e

    def certificate(self) -> bytes:
        """Certificate of the other side, DER."""
        return self._tls.getpeercert(True) or b""

    async def readexactly(self, count: int) -> bytes:
        """See :meth:`asyncio.StreamReader.readexactly`. Raises IncompleteReadError if the stream
        ends early, or is TLS no more: the carrier did that, not the peer whose identity is
        proven."""
        got = bytearray()
        while len(got) < count:
            try:
                piece = self._tls.read(count - len(got))
            except ssl.SSLWantReadError:
                try:
                    await self._more()
                except EOFError as e:
                    raise asyncio.IncompleteReadError(bytes(got), count) from e
                continue
            except ssl.SSLError as e:
                raise asyncio.IncompleteReadError(bytes(got), count) from e
            if not piece:
                raise asyncio.IncompleteReadError(bytes(got), count)
            got += piece
        return bytes(got)

    async def read(self, count: int) -> bytes:
        """Read at least one byte, or b"" at the end of the stream."""
        try:
            return await self.readexactly(min(1, count))
        except asyncio.IncompleteReadError:
            return b""

    def write(self, data: bytes) -> None:
        """See :meth:`asyncio.StreamWriter.write`."""
        self._tls.write(data)
        self._writer.write(self._outgoing.read())

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    async def _flush(self) -> None:
        if self._outgoing.pending:
            self._writer.write(self._outgoing.read())
            await self._writer.drain()

    async def _more(self) -> None:
        await self._flush()
        if self._incoming.pending > HELD:
            raise WireError("TLS records without end")
        piece = await self._reader.read(PIECE)
        if not piece:
            raise EOFError("the stream ended")
        self._incoming.write(piece)


async def call(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    me: Identity,
    peer: PeerId,
    run_id: str,
) -> Secured:
    """The caller's side: a private stream to ``peer``. Raises PeerFault (weight 0) when the other
    end is not ``peer``, or the stream breaks off."""
    stream = Secured(reader, writer, _client(), server=False)
    try:
        await stream.shake()
        shown = hashlib.sha256(stream.certificate()).digest()
        asked = await stream.readexactly(NONCE_BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        said = _said(run_id, me.peer_id, peer, shown, asked)
        stream.write(me.public + _PROOF.pack(nonce, me.sign(said, _CALLER)))
        await stream.drain()
        answer = await stream.readexactly(SIGNATURE_BYTES)
        verify(peer, _said(run_id, me.peer_id, peer, shown, nonce), answer, _CALLEE)
    except Refused as e:
        raise PeerFault(
            peer,
            "somebody else answers in its place: its identity key did not sign this connection",
        ) from e
    except (WireError, EOFError, OSError) as e:
        raise PeerFault(peer, f"no private connection through the relay: {e}") from e
    return stream


async def answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    me: Identity,
    shown: ServerCertificate,
    run_id: str,
) -> tuple[PeerId, Secured]:
    """The callee's side: the proven caller, and the private stream.

    Raises WireError for nonsense, Refused when the caller's signature is not over this connection.
    """
    stream = Secured(reader, writer, _server(shown.pem, shown.key), server=True)
    try:
        await stream.shake()
        nonce = secrets.token_bytes(NONCE_BYTES)
        stream.write(nonce)
        await stream.drain()
        peer = peer_id_of(await stream.readexactly(KEY_BYTES))
        theirs, signature = _PROOF.unpack(await stream.readexactly(_PROOF.size))
        digest = shown.digest
        verify(peer, _said(run_id, peer, me.peer_id, digest, nonce), signature, _CALLER)
        stream.write(me.sign(_said(run_id, peer, me.peer_id, digest, theirs), _CALLEE))
        await stream.drain()
    except EOFError as e:
        raise WireError(f"the relayed stream ended: {e}") from e
    return peer, stream


def _said(run_id: str, caller: PeerId, callee: PeerId, certificate: bytes, nonce: bytes) -> bytes:
    words = [run_id.encode(), caller.encode(), callee.encode(), certificate, nonce]
    return b"".join(struct.pack(">H", len(w)) + w for w in words)


@lru_cache(maxsize=1)
def _client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Nobody signs the certificate: what counts is the signature inside, over the certificate that
    # was seen here.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@lru_cache(maxsize=4)
def _server(certificate: bytes, key: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The library reads certificates from files only; this one is in memory for as long as the
    # process lives.
    with tempfile.NamedTemporaryFile(prefix="tutti-tls-") as file:
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


# ------------------------------------------------------------ certificates


def make_certificate() -> ServerCertificate:
    """A new key and certificate, valid from :data:`BEGIN` to :data:`NO_END`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name_of(key.public_key())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGIN)
        .not_valid_after(NO_END)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_USAGE, critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return ServerCertificate(secret, made.public_bytes(serialization.Encoding.PEM), name)


def check_certificate(pem: bytes) -> str:
    """The DNS name to expect from a server that shows ``pem``, the certificate to pin.

    Raises WireError unless it is a single certificate of the form :func:`make_certificate` makes.
    In particular it must not be able to sign others: BoringSSL lets any root without that
    restriction vouch for a second certificate.
    """
    if len(pem) > CERTIFICATE_BYTES or pem.count(b"-----BEGIN") != 1:
        raise WireError("not a single certificate")
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        key = certificate.public_key()
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (
        ValueError,
        UnsupportedAlgorithm,
        x509.InvalidVersion,
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
    ) as e:
        raise WireError(f"not a certificate of ours: {e}") from e
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise WireError("the certificate's key is not P-256")
    if basic.value.ca or not usage.critical or usage.value != _USAGE:
        raise WireError("the certificate may sign others")
    name = _name_of(key)
    if list(names) != [x509.DNSName(name)]:
        raise WireError("the certificate's name is not the hash of its key")
    return name


def _name_of(key: ec.EllipticCurvePublicKey) -> str:
    spki = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).hexdigest()[:32] + ".tutti"
