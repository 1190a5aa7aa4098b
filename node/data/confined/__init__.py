"""Processes in which foreign data is parsed, under limits of memory and of processor time.
Enters: bytes of files that others wrote, and their tokenizers.
Never: a path, an address, a secret.
"""
