"""Attacks on live daemons, for :mod:`benchmarks.strangers`. Strangers and bent members attack from
processes of their own; loopback only, at a bounded rate, for a bounded time."""
