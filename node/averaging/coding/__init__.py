"""Numbers to bytes and back, in formats that are checked before anything is allocated."""
