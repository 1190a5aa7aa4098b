"""A text under a signature: the signature in base64, a line feed, the body. Pure. Enters: a body,
or a text that somebody tells. Leaves: the text, or the body whose signature was checked.

Base64 of 64 bytes has four bits that decoders ignore, so one signature has sixteen spellings. A
text that is compared, counted or posted by its bytes has to have one.
"""

import base64

from node.core.ids import PeerId
from node.identity.keys import Identity, verify


def sign_text(identity: Identity, body: str, domain: str) -> str:
    """The text of ``body`` under the signature of ``identity``."""
    return base64.b64encode(identity.sign(body.encode(), domain)).decode() + "\n" + body


def signed_body(signer: PeerId, text: str, domain: str) -> str:
    """The body of a text that ``signer`` signed. Raises ValueError for another spelling of the
    signature, and as :func:`node.identity.keys.verify`."""
    spelled, _, body = text.partition("\n")
    signature = base64.b64decode(spelled, validate=True)
    if base64.b64encode(signature).decode() != spelled:
        raise ValueError("its signature is spelled in another way than it is written")
    verify(signer, body.encode(), signature, domain)
    return body
