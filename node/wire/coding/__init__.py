"""Numbers to bytes and back in formats of few bits, checked before anything is allocated. Enters:
fp32 numbers, or the bytes of a part. Never: bytes that were not counted first."""
