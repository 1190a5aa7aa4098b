"""Signed texts: a signature in base64, a line feed and the body. Pure. Enters: a body to sign, or a
text to check. Leaves: the text, or its checked body.

Base64 of 64 bytes has four bits that decoders ignore, so one signature has sixteen spellings. A
text that is compared, counted or posted by its bytes has to have one.
"""

import base64

from node.core.ids import PeerId
from node.identity.keys import Identity, verify


def spelled(signature: bytes) -> str:
    """A signature in base64."""
    return base64.b64encode(signature).decode()


def signature_of(text: str) -> bytes:
    """The signature that :func:`spelled` gave. Raises ValueError for text that is no base64, and
    for another spelling of the same bytes."""
    signature = base64.b64decode(text, validate=True)
    if spelled(signature) != text:
        raise ValueError("its signature is spelled in another way than it is written")
    return signature


def sign_text(identity: Identity, body: str, domain: str) -> str:
    """The text of ``body`` under the signature of ``identity``."""
    return spelled(identity.sign(body.encode(), domain)) + "\n" + body


def signed_body(signer: PeerId, text: str, domain: str) -> str:
    """The body of a text that ``signer`` signed. Raises ValueError for another spelling of the
    signature, and as :func:`node.identity.keys.verify`."""
    first, _, body = text.partition("\n")
    verify(signer, body.encode(), signature_of(first), domain)
    return body
