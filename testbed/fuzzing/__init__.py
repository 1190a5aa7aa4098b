"""Parsers of foreign bytes, mutations of valid messages, and the check of both."""
