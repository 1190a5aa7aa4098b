"""The version of this software; pyproject.toml says the same."""

VERSION = "0.1.0"
