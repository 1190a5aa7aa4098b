"""Commands that only enter a network namespace: a daemon that has one is forked. No daemon runs."""

import pytest

from testbed.daemons import namespaces
from testbed.networks.internet import Place
from testbed.networks.wan import Wan


def test_hosts_of_both_networks_are_entered_by_their_names():
    place = Place("anna", "home", "tn7anna", "192.168.10.2", "")
    assert namespaces.entered(place.through) == "tn7anna"
    wan = Wan(2)
    assert namespaces.entered(wan.host(1).through) == wan.names[1]


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("nice",),
        ("env", "A=b"),
        (*namespaces.through("tn7anna"), "env", "A=b"),
    ],
)
def test_a_command_that_does_more_is_run(command: tuple[str, ...]):
    assert namespaces.entered(command) == ""
