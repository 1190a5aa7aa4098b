"""Which tutti this is."""

VERSION = "0.1.0"
"""Of the software; pyproject.toml says the same."""
PROTOCOL = 1
"""Of what peers say to each other; unequal versions part politely."""
UPDATE = "update this tutti:  git pull && make setup  in its checkout, then  tutti start"
"""What helps who meets something newer."""
