"""How a daemon keeps its device busy and its event loop free: parts 2 and 3 of
``benchmarks/device.py``. Never: figures of the arithmetic itself.
"""
