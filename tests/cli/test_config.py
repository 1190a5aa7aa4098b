"""``tutti config`` prints a file that says what every setting means and reads back as it was."""

import json
import re

from node.config import KNOWN, NodeConfig, config_document, config_toml


def test_every_setting_has_a_meaning_and_reads_back(tmp_path):
    flags = {
        "name": "anna-4090",
        "transport.announce": "a:1,b:2",
        "limits.in_flight": "4",
        "nice": "0",
        "max_up": "20Mbit",
    }
    config = NodeConfig.load({"home": tmp_path, **flags}, {})
    text = config_toml(config)
    assert len(re.findall(r"(?m)^[a-z0-9_]+ = ", text)) == len(flags)
    (tmp_path / "config.toml").write_text(text)
    assert NodeConfig.load({"home": tmp_path}, {}) == config
    # Every line behind a # is a setting, too, and has its default.
    (tmp_path / "config.toml").write_text(re.sub(r"(?m)^# (?=[a-z0-9_]+ = )", "", text))
    whole = NodeConfig.load({"home": tmp_path}, {})
    assert whole == config
    assert set(whole.sources) == set(KNOWN)


def test_every_setting_says_what_it_means(tmp_path):
    document = config_document(NodeConfig.load({"home": tmp_path}, {}))
    assert set(document) == set(KNOWN)
    assert [name for name, said in document.items() if not said["meaning"]] == []
    assert {said["source"] for said in document.values()} == {""}


def test_the_command_says_where_values_come_from(tutti, home):
    home.mkdir()
    (home / "config.toml").write_text("threads = 3\n")
    said = json.loads(tutti("config", "--set", "nice=1", "--json").good())
    for name, value, source in (("threads", 3, str(home / "config.toml")), ("nice", 1, "--nice")):
        assert (said[name]["value"], said[name]["source"]) == (value, source)
    assert "\nthreads = 3\n" in tutti("config").good()
