"""Twelve places of a public cloud and the links between them, as SkipPipe's authors published them.
Pure data."""

PLACES = (
    "Belgium",
    "Canada",
    "Germany",
    "Iowa",
    "Japan",
    "LA",
    "NL",
    "Oregon",
    "Singapore",
    "Taiwan",
    "London",
    "Australia",
)
"""In the order of their setting A: peer i is at place i mod 12."""

_LINKS: dict[str, dict[str, tuple[float, float]]] = {
    "Australia": {
        "Belgium": (129, 10.06),
        "Canada": (98, 13.5),
        "Germany": (125.5, 10.71),
        "Iowa": (84, 11.5),
        "Japan": (58, 14.12),
        "LA": (69, 15),
        "NL": (128, 9.75),
        "Oregon": (68, 15),
        "Singapore": (48, 30.5),
        "Taiwan": (67, 21.5),
        "London": (132, 9.625),
    },
    "Belgium": {
        "Canada": (41, 20.38),
        "Germany": (4, 248.3),
        "Iowa": (49, 29),
        "Japan": (112, 12),
        "LA": (70, 19.88),
        "NL": (3, 248.3),
        "Oregon": (66, 21.38),
        "Singapore": (83, 16.5),
        "Taiwan": (105, 12.75),
        "London": (3.5, 248.3),
    },
    "Canada": {
        "Germany": (44, 32.62),
        "Iowa": (14, 77.5),
        "Japan": (74, 18.5),
        "LA": (35, 31.25),
        "NL": (42, 25.62),
        "Oregon": (30.5, 48.25),
        "Singapore": (107, 12.22),
        "Taiwan": (89, 15.06),
        "London": (38.5, 37.25),
    },
    "Germany": {
        "Iowa": (53.5, 27.25),
        "Japan": (112, 11.35),
        "LA": (73, 18.69),
        "NL": (3.5, 248.3),
        "Oregon": (68, 15.28),
        "Singapore": (80, 12.8),
        "Taiwan": (102, 12.88),
        "London": (6.6, 193.3),
    },
    "Iowa": {
        "Japan": (72.5, 14.31),
        "LA": (23.4, 62.94),
        "NL": (51, 28.06),
        "Oregon": (19.3, 92.5),
        "Taiwan": (88, 13.11),
        "Singapore": (101.5, 12.94),
        "London": (48.1, 22.38),
    },
    "Japan": {
        "LA": (50, 28.44),
        "NL": (108.5, 11.65),
        "Oregon": (46.2, 31.19),
        "Singapore": (35.6, 39.94),
        "Taiwan": (19.2, 78.56),
        "London": (107, 9.1),
    },
    "LA": {
        "NL": (71.5, 14.59),
        "Oregon": (12.4, 121.4),
        "Singapore": (79.5, 17.25),
        "Taiwan": (64, 16.58),
        "London": (68, 15.28),
    },
    # London's published bandwidth is 0.2425, a thousandth of its neighbours': a slip of units.
    "NL": {
        "Oregon": (67, 20.88),
        "Singapore": (81.5, 16.75),
        "Taiwan": (105.5, 12.25),
        "London": (4.8, 248.3),
    },
    "Oregon": {"Singapore": (78.5, 17.19), "Taiwan": (59.5, 23.88), "London": (64, 21.75)},
    "Singapore": {"Taiwan": (23.2, 63.38), "London": (85, 16.06)},
    "Taiwan": {"London": (109.5, 9.175)},
}
HERE = (1.0, 2048.0)


def link(a: str, b: str) -> tuple[float, float]:
    """(milliseconds one way, MiB per second) between two places, the same both ways. Raises
    KeyError for a place not listed."""
    if a == b:
        return HERE
    found = _LINKS.get(a, {}).get(b) or _LINKS.get(b, {}).get(a)
    if found is None:
        raise KeyError(f"{a} to {b}")
    return found
