"""The certificate a gRPC server shows, and what a certificate must look like to be pinned.

Nobody signs it and nobody needs to: the handshake delivers it over a connection that proves the
PeerId, and a client accepts exactly this one. P-256 because gRPC's TLS has no Ed25519.
"""

from __future__ import annotations

import datetime
import hashlib

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from node.core.errors import WireError
from node.reach.secure import ServerCertificate

CERTIFICATE_BYTES = 4096
DAY_S = 86400
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


def make_certificate(wall: float) -> ServerCertificate:
    """A new key and certificate, valid from a day before Unix second ``wall`` (clocks differ) for a
    year."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name_of(key.public_key())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    begin = datetime.datetime.fromtimestamp(wall - DAY_S, datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=366))
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
