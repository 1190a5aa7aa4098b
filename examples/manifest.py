"""A manifest written by a program: changed, signed, read back, and refused when it was forged.

A manifest holds what all peers of a run agree on. Its hash is the run's id, so each change makes
another run. A program that founds runs does what `tutti swarm init` does.

    python examples/manifest.py
"""

from node.core.errors import LocalFault
from node.identity.keys import Identity
from node.manifest import Manifest, amended

CHANGES = {
    "swarm.name": "poems",
    "model.layers": 12,
    "model.d_model": 256,
    "optimizer.name": "adamw",
    "averaging.reducer": "trimmed-mean",
}


def main() -> None:
    """Write a manifest, read it as a joiner does, and show two refusals."""
    owner = Identity.ephemeral()
    first = amended(Manifest.default_demo(), CHANGES)
    file = first.sign(owner)
    # A joiner reads the file and checks the signature before it believes any of it.
    manifest = Manifest.parse(file)
    manifest.verify()
    print(f"file        {len(file)} bytes, format {manifest.format}")
    print(f"its owner   {manifest.swarm.owner == owner.peer_id}")
    print(
        f"model       {manifest.parameter_count():,} parameters in {manifest.model.layers} layers"
    )
    print(f"same run    {Manifest.parse(manifest.to_toml()).run_id == manifest.run_id}")
    wider = amended(manifest, {"model.d_model": 320})
    print(f"another run {wider.run_id != manifest.run_id}")
    try:
        Manifest.parse(file.replace(b"layers = 12", b"layers = 13")).verify()
    except LocalFault as fault:
        print(f"forged      {fault.what}")
    try:
        amended(manifest, {"averaging.reducer": "average"})
    except LocalFault as fault:
        print(f"unknown     {fault.what}: {fault.next_step}")


if __name__ == "__main__":
    main()
