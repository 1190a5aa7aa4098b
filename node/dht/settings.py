"""The directory's knobs."""

from dataclasses import dataclass

from node.core.tables import setting


@dataclass(frozen=True)
class DirectorySettings:
    """Settings of this peer; a manifest cannot change them."""

    refresh_s: float = setting(
        5.0,
        "Seconds between two publications of the own record, and between two readings of the "
        "others'.",
        least=0.1,
        most=3600,
    )
    ttl_s: float = setting(20.0, "Lifetime of a record, in seconds.", least=1, most=3600)
    max_record: int = setting(
        4096, "Bytes of one signed record; larger ones are refused unread.", least=256, most=1 << 20
    )
    max_ttl_s: float = setting(
        600.0,
        "Longest remaining lifetime that a record may claim, in seconds; a longer one is refused.",
        least=1,
        most=86400,
    )
    max_peers: int = setting(
        512, "Number of writers remembered and stored for one run; further strangers are refused."
    )
    max_postings: int = setting(
        4096,
        "Records under other topics of the run that are stored, all together; beyond it only the "
        "own ones, and those of topics that this peer uses itself.",
    )
    lookup_timeout_s: float = setting(
        5.0,
        "Seconds after which one reading or one publication is given up; the next one tries again.",
    )
    rejoin_s: float = setting(
        1.0,
        "First pause between attempts to reach bootstrap peers that do not answer; doubles up to "
        "rejoin_max_s.",
    )
    rejoin_max_s: float = setting(
        30.0, "Longest pause between attempts to reach bootstrap peers that do not answer."
    )
