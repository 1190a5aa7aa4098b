"""docker-compose.yml: valid by the specification's own schema, and the swarm that the image and the
code expect."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from node.config import ENVIRONMENT, NodeConfig
from node.manifest import read_manifest

READ = {*ENVIRONMENT, "TUTTI_HOME", "TUTTI_CONFIG"}
STAGES = 3
REPLICAS = 2
GPU = "stage-1-gpu"
"""The service that only the profile ``gpu`` starts."""


@pytest.fixture(scope="session")
def compose(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / "docker-compose.yml").read_text())


@pytest.fixture(scope="session")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    return compose["services"]


@pytest.fixture(scope="session")
def peers(services: dict[str, Any]) -> dict[str, Any]:
    """Every service that runs on: the rendezvous, the ends, the stages."""
    return {name: service for name, service in services.items() if name != "founder"}


@pytest.fixture(scope="session")
def dockerfile(root: Path) -> list[tuple[str, str]]:
    """(instruction, argument) of every line, continuations joined."""
    text = re.sub(r"\\\n", " ", (root / "Dockerfile").read_text())
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")
    ]
    return [
        (word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines)
    ]


@pytest.fixture(scope="session")
def image_env(dockerfile: list[tuple[str, str]]) -> dict[str, str]:
    final = dockerfile[max(i for i, (word, _) in enumerate(dockerfile) if word == "FROM") :]
    return dict(
        pair.split("=", 1) for word, rest in final if word == "ENV" for pair in shlex.split(rest)
    )


def complaints(root: Path, document: dict[str, Any]) -> list[str]:
    schema = json.loads((root / "tests/packaging/compose-spec.json").read_text())
    return [e.message for e in jsonschema.Draft7Validator(schema).iter_errors(document)]


def test_the_file_is_a_compose_file(root: Path, compose: dict[str, Any]) -> None:
    assert complaints(root, compose) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"healthchek": {}}, "healthchek"),
        ({"read_only": "yes"}, "'yes' is not of type 'boolean'"),
        ({"cap_drop": "ALL"}, "'ALL' is not of type 'array'"),
        ({"depends_on": {"x": {"condition": "running"}}}, "depends_on|not valid under any"),
        ({"healthcheck": {"tests": []}}, "tests|Additional"),
        (
            {"deploy": {"resources": {"reservations": {"devices": [{"capabilities": "gpu"}]}}}},
            "'gpu' is not of type 'array'",
        ),
    ],
)
def test_the_schema_sees_mistakes(
    root: Path, compose: dict[str, Any], change: dict[str, Any], says: str
) -> None:
    broken = json.loads(json.dumps(compose))
    broken["services"]["ends"].update(change)
    assert re.search(says, " ".join(complaints(root, broken)))


def test_the_services_host_every_stage_and_one_rendezvous(services: dict[str, Any]) -> None:
    services = {name: s for name, s in services.items() if name != GPU}
    roles = {name: s["environment"].get("TUTTI_ROLE") for name, s in services.items()}
    stages = Counter(
        int(s["environment"]["TUTTI_STAGE"])
        for s in services.values()
        if "TUTTI_STAGE" in s["environment"]
    )
    assert Counter(roles.values()) == {
        None: 1,
        "rendezvous": 1,
        "ends": 1,
        "stage": STAGES * REPLICAS,
    }
    assert stages == dict.fromkeys(range(1, STAGES + 1), REPLICAS)
    assert all(
        (roles[name] == "stage") == ("TUTTI_STAGE" in s["environment"])
        for name, s in services.items()
    )
    assert f"--stages {STAGES}" in services["founder"]["command"][0]


def test_a_gpu_is_taken_where_it_is_asked_for_alone(services: dict[str, Any]) -> None:
    assert [name for name, s in services.items() if "profiles" in s] == [GPU]
    service = services[GPU]
    assert service["profiles"] == ["gpu"]
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    devices = {name: s["environment"].get("TUTTI_DEVICE") for name, s in services.items()}
    assert [name for name, on in devices.items() if on != "cpu" and name != "founder"] == [GPU]
    assert devices[GPU] == "cuda:0"
    assert all(GPU not in s.get("depends_on", {}) for s in services.values())


def test_one_image_built_once(services: dict[str, Any]) -> None:
    assert {s["image"] for s in services.values()} == {"tutti:local"}
    assert [name for name, s in services.items() if "build" in s] == ["founder"]


def test_every_variable_is_one_the_code_reads(
    services: dict[str, Any], image_env: dict[str, str]
) -> None:
    used = {v for s in services.values() for v in s["environment"]} | {
        v for v in image_env if v.startswith("TUTTI_")
    }
    assert used <= READ, f"nobody reads {sorted(used - READ)}"
    assert all(
        isinstance(value, str) for s in services.values() for value in s["environment"].values()
    )


def test_the_code_reads_from_them_what_is_meant(
    peers: dict[str, Any], image_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "node.toml").write_text('join = ["/dns4/rendezvous/tcp/31337/p2p/12D3KooW"]\n')
    for name, service in peers.items():
        env = {**image_env, **service["environment"]}
        if "TUTTI_CONFIG" in env:
            env["TUTTI_CONFIG"] = str(tmp_path / "node.toml")
        config = NodeConfig.load({}, env)
        stage = int(name.split("-")[1]) if name.startswith("stage-") else None
        own = (config.node.name, config.node.role, config.stage)
        assert own == (name, name.split("-")[0], stage)
        assert (str(config.home), str(config.swarm)) == ("/state", "/swarm/swarm.toml")
        assert bool(config.node.join) == (name != "rendezvous"), "nobody dials himself"
        assert config.transport.host == "0.0.0.0"
        assert config.transport.announce == (f"{name}:{config.transport.grpc_port}",), (
            "others dial the service's name"
        )


def test_image_services_and_commands_name_the_same_ports(
    services: dict[str, Any], image_env: dict[str, str], dockerfile: list[tuple[str, str]]
) -> None:
    p2p = image_env["TUTTI_P2P_PORT"]
    grpc = image_env["TUTTI_GRPC_PORT"]
    bypass = image_env["TUTTI_TRANSPORT_BYPASS_PORT"]
    assert [rest for word, rest in dockerfile if word == "EXPOSE"] == [
        f"{p2p}/tcp {p2p}/udp {grpc}/tcp {bypass}/tcp"
    ]
    for name, service in services.items():
        assert service["environment"].get("TUTTI_P2P_PORT", p2p) == p2p
        assert service["environment"].get("TUTTI_GRPC_PORT", grpc) == grpc
        assert service["environment"].get("TUTTI_TRANSPORT_BYPASS_PORT", bypass) == bypass
        if "ports" in service:
            open_to_host = [f"127.0.0.1:{port}:{port}/tcp" for port in (p2p, bypass)]
            assert (name, service["ports"]) == ("rendezvous", open_to_host)
    assert f"/dns4/rendezvous/tcp/{p2p}/p2p/" in services["founder"]["command"][0]


def test_every_peer_keeps_its_state_in_a_volume_of_its_own(
    compose: dict[str, Any], peers: dict[str, Any]
) -> None:
    mounts = {name: dict(v.split(":", 1) for v in s["volumes"]) for name, s in peers.items()}
    assert all(mounts[name] == {"swarm": "/swarm:ro", name: "/state"} for name in peers)
    assert set(compose["volumes"]) == {"swarm", *peers}
    founder = compose["services"]["founder"]
    assert founder["volumes"] == ["swarm:/swarm", "rendezvous:/state"], (
        "it is the rendezvous-to-be who signs"
    )
    assert founder["environment"]["TUTTI_HOME"] == "/state"


def test_peers_wait_for_the_rendezvous_and_it_for_the_founder(peers: dict[str, Any]) -> None:
    assert peers["rendezvous"]["depends_on"] == {
        "founder": {"condition": "service_completed_successfully"}
    }
    for name in peers.keys() - {"rendezvous"}:
        assert peers[name]["depends_on"] == {"rendezvous": {"condition": "service_healthy"}}


def test_no_container_may_more_than_it_needs(
    services: dict[str, Any], dockerfile: list[tuple[str, str]]
) -> None:
    user = [rest for word, rest in dockerfile if word == "USER"][-1]
    assert user.split(":")[0] not in ("0", "root")
    confined = {
        "user": user,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
    }
    for service in services.values():
        assert service == {**service, **confined}
        assert [t.split(":")[0] for t in service["tmpfs"]] == ["/tmp"]
        assert (
            not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & service.keys()
        )


def test_the_health_check_asks_the_daemons_status(
    peers: dict[str, Any], dockerfile: list[tuple[str, str]]
) -> None:
    check = next(rest for word, rest in dockerfile if word == "HEALTHCHECK")
    command = json.loads(check[check.index("CMD") + 4 :])
    assert command == ["tutti", "status", "--plain"]
    for service in peers.values():
        assert service["healthcheck"]["test"] == ["CMD", *command]
        assert (service["command"], service["restart"]) == (["start"], "on-failure")


def test_the_image_is_pinned_and_starts_tutti(
    root: Path, dockerfile: list[tuple[str, str]]
) -> None:
    assert {rest.split(" AS ")[0] for word, rest in dockerfile if word == "FROM"} == {
        "python:3.11-slim"
    }
    assert ("ENTRYPOINT", '["tutti"]') in dockerfile
    assert ("CMD", '["start"]') in dockerfile
    installs = [rest for word, rest in dockerfile if word == "RUN" and "pip install" in rest]
    assert "--require-hashes" in installs[0]
    assert '"torch==2.13.0"' in installs[1]
    allowed = {
        line[1:]
        for line in (root / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        Path(p).name
        for word, rest in dockerfile
        if word == "COPY" and not rest.startswith("--from")
        for p in rest.split()[:-1]
    }
    assert copied == allowed
    assert all((root / name).exists() for name in allowed)


def test_the_founder_writes_what_the_others_read(
    root: Path, services: dict[str, Any], peers: dict[str, Any], tmp_path: Path
) -> None:
    """The script runs here, on the real command line, with its two volumes in a temporary place."""
    swarm = tmp_path / "swarm"
    state = tmp_path / "state"
    bin_dir = tmp_path / "bin"
    for folder in (swarm, state, bin_dir):
        folder.mkdir()
    run = shlex.join([sys.executable, str(root / "cli.py")])
    (bin_dir / "tutti").write_text(f'#!/bin/sh\nexec {run} "$@"\n')
    (bin_dir / "tutti").chmod(0o755)
    founder = services["founder"]
    script = founder["command"][0].replace("$$", "$").replace("/swarm/", f"{swarm}/")
    env = {"PATH": f"{bin_dir}:{os.environ['PATH']}", "HOME": str(state), "TUTTI_HOME": str(state)}

    for _ in range(2):  # the second time there is nothing to do
        subprocess.run(
            [*founder["entrypoint"], script],
            check=True,
            env=env,
            timeout=120,
            capture_output=True,
            cwd=state,
        )
        assert {p.name for p in swarm.iterdir()} == {"swarm.toml", "node.toml"}
    manifest = read_manifest(swarm / "swarm.toml")
    manifest.verify()
    assert manifest.pipeline.stages == STAGES

    config = NodeConfig.load(
        {}, {**peers["ends"]["environment"], "TUTTI_CONFIG": str(swarm / "node.toml")}
    )
    assert config.node.join == (
        f"/dns4/rendezvous/tcp/{config.transport.p2p_port}/p2p/{manifest.swarm.owner}",
    )
    assert (state / "identity.key").stat().st_mode & 0o077 == 0
