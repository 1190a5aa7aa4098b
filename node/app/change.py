"""The owner's change to how a running swarm averages: [outer] and averaging.cell, numbered and
signed. Enters: the manifest of the run, and its owner's wish or a peer's text. Leaves: the signed
text, or the settings in it. Never: a file, a socket.

The text is the signature in base64, a line feed, and the signed JSON. It names the run, so it is
worth nothing in another.
"""

import dataclasses
import json
from collections.abc import Collection
from typing import Any

from node.averaging.strategies.outer import OuterSettings
from node.consensus.rules import MAX_CHANGE, Rules
from node.core.errors import Refused, Removed, UsageFault
from node.core.tables import build, check, settings_of
from node.identity.keys import Identity
from node.identity.signed_text import sign_text, signed_body
from node.manifest import GONE, SECTIONS, Manifest, gone, named

DOMAIN = "tutti/change/1"
MAX_REVISION = 1 << 53
_AGAIN = "only the owner of the run can change it:  tutti swarm switch FILE"


def wanted(manifest: Manifest, raw: bytes) -> Manifest:
    """The run's manifest with averaging.cell and [outer] as in a file; fields of these that the
    file leaves out have their defaults.

    Raises UsageFault when the file asks for anything else that differs from the manifest, or when
    its fields do not go together.
    """
    asked = Manifest.parse(raw)
    fixed = [
        f"{s}.{k}"
        for s, k in named(raw)
        if s != "outer"
        and (s, k) not in (("averaging", "cell"), ("swarm", "owner"))
        and getattr(getattr(asked, s), k) != getattr(getattr(manifest, s), k)
    ]
    if fixed:
        raise UsageFault(
            "only averaging.cell and [outer] can change while a run is under way, not "
            f"{', '.join(fixed)}",
            "leave the rest out of the file; other settings make another run:  tutti swarm init "
            "--from FILE",
        )
    return _amended(manifest, asked.averaging.cell, asked.outer)


def signed(
    manifest: Manifest,
    changed: Manifest,
    revision: int,
    identity: Identity,
    revoked: Collection[str] = (),
) -> str:
    """The change that others follow. ``revoked``: marks of all peers that are put out of the run.
    Raises Refused if ``identity`` does not own the run, UsageFault for an invalid number and for
    more peers than a change has room for."""
    if identity.peer_id != manifest.swarm.owner:
        raise Refused(
            f"the run belongs to {manifest.swarm.owner or 'nobody'}, not to you "
            f"({identity.peer_id})",
            _AGAIN,
        )
    if not 0 < revision < MAX_REVISION:
        raise UsageFault(f"revision {revision}", "changes are numbered from 1 on")
    document: dict[str, Any] = {
        "run": manifest.run_id,
        "revision": revision,
        "cell": changed.averaging.cell,
        "outer": _differing(changed.outer),
    }
    if revoked:
        document["revoked"] = sorted(revoked)
    body = json.dumps(
        document,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    text = sign_text(identity, body, DOMAIN)
    if len(text) > MAX_CHANGE:
        raise UsageFault(
            f"{len(revoked)} revoked peers do not fit into a change of {MAX_CHANGE} characters",
            "take some back, or begin a private run:  tutti swarm init --private",
        )
    return text


def under(manifest: Manifest, rules: Rules) -> Manifest:
    """The manifest with these settings for how cells average: the owner's newest change to it, or
    its own."""
    averaging = dataclasses.replace(manifest.averaging, cell=rules.cell or "all")
    return dataclasses.replace(manifest, outer=rules.outer, averaging=averaging)


def read(manifest: Manifest, change: str) -> Rules:
    """The settings in a change, "" for the manifest's own. Raises Refused, with the reason, for one
    that nobody may follow."""
    if not change:
        return Rules(manifest.averaging.peers, manifest.outer)
    if len(change) > MAX_CHANGE:
        raise Refused(
            f"a change of {len(change)} characters, at most {MAX_CHANGE} are read", _AGAIN
        )
    try:
        table: dict[str, Any] = json.loads(signed_body(manifest.swarm.owner, change, DOMAIN))
        known = {"run", "revision", "cell", "outer"}
        if set(table) - {"revoked"} != known or table["run"] != manifest.run_id:
            raise Refused("a change of another run", _AGAIN)
        revision = check("revision", table["revision"], int)
        if not 0 < revision < MAX_REVISION:
            raise Refused(f"a change with the number {revision}", _AGAIN)
        for key in table["outer"]:
            if f"outer.{key}" in GONE:
                raise gone(f"outer.{key}")
        cell = settings_of(SECTIONS)["averaging.cell"].check(table["cell"])
        changed = _amended(manifest, cell, build(OuterSettings, table["outer"], "outer"))
        revoked = frozenset(map(_marked, table.get("revoked", ())))
    except Removed as e:
        raise Refused(
            f"the owner's change cannot be followed: {e}", f"{e.next_step}; {_AGAIN}"
        ) from e
    except (UsageFault, ValueError, TypeError, RecursionError) as e:
        raise Refused(
            f"not a change that the owner signed for this run: {str(e)[:200]}", _AGAIN
        ) from e
    return Rules(changed.averaging.peers, changed.outer, revision, change, revoked)


def _marked(told: Any) -> str:
    if type(told) is not str or len(told) != 16 or not set(told) <= set("0123456789abcdef"):
        raise ValueError("a revoked peer is named by 16 hex digits")
    return told


def _differing(outer: OuterSettings) -> dict[str, Any]:
    """The settings that differ from the defaults. A reader of a change fills in the defaults, so a
    setting that it does not know hinders it only where that setting is used."""
    usual = dataclasses.asdict(OuterSettings())
    return {k: v for k, v in dataclasses.asdict(outer).items() if v != usual[k]}


def _amended(manifest: Manifest, cell: int | str, outer: OuterSettings) -> Manifest:
    changed = dataclasses.replace(
        manifest, averaging=dataclasses.replace(manifest.averaging, cell=cell), outer=outer
    )
    changed.check()
    was = manifest.outer.window_s
    asked = outer.window_s
    if asked != was:
        raise UsageFault(
            f"outer.window_s is {was!r} and cannot change during a run (asked for: {asked!r})",
            "another value makes another run:  tutti swarm init --from FILE",
        )
    return changed
