"""Two daemons copy their checkpoints to one directory, lose their disks, and go on from it."""

import shutil

import pytest

from node.checkpoint.archive.address import Address
from node.checkpoint.archive.place import Archive
from node.core.ids import PeerId

pytestmark = pytest.mark.swarm

SETTINGS = dict(
    pipeline__stages=1,
    training__min_replicas=1,
    training__epochs=100_000,
    training__target_batch=8,
    training__eval_every=0,
)


def test_a_run_goes_on_from_copies_of_its_checkpoints(box) -> None:
    peers = box.swarm((1, 1), **SETTINGS)
    there = f"file://{box.root}/backup?password=secret77"
    place = {
        "TUTTI_CHECKPOINT_TO": there,
        "TUTTI_CHECKPOINT_TO_EVERY": "1s",
        "TUTTI_CHECKPOINT_WITHIN_S": "10",
    }
    for peer in peers:
        peer.environment = {**peer.environment, **place}
    box.start(*peers)
    archive = Archive(Address(there), box.manifest.run_id, PeerId("nobody"))

    def in_common() -> int:
        """The newest epoch that both stages have whole in the archive, 0 for none."""
        both = [{whole.epoch for whole in archive.copies(stage)} for stage in (0, 1)]
        return max(both[0] & both[1], default=0)

    box.wait("copies of one epoch", in_common, must_run=tuple(peers))
    for peer in peers:
        line = box.wait("its line", lambda p=peer: p.status().archive.known and p.status().archive)
        assert line.to.startswith("file://")
        assert not line.trouble
        assert "secret77" not in peer.said()
        assert "secret77" not in peer.events_path.read_text()
    assert set(box.stop_all().values()) == {0}
    reached = in_common()

    # Both disks are lost; keys and ports stay.
    for peer in peers:
        shutil.rmtree(peer.home / "swarms")
        peer.environment = {**peer.environment, "TUTTI_RESTORE": there}
    box.start(*peers)
    for peer in peers:
        [event] = peer.events("restored-from-archive")
        assert reached in event["fields"]["epochs"]
        assert peer.status().epoch >= reached
        assert not peer.events("task-failed")
    box.goes_on(2)
    assert set(box.stop_all().values()) == {0}
