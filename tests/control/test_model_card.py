"""README.md of an export: what the hub reads from it, and what people do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from node.app.export.model_card import Result, StartingModel, model_card, source_in
from node.core.journey import Losses, Version
from node.manifest import Manifest, amended

RESULT = Result(Version(120, "ab" * 16), 41_200_000, 1.5, 1.75)
FINEWEB = {"data.source": "hf:HuggingFaceFW/fineweb-edu@0123abc:sample-10BT:train"}


def card(
    changes: dict[str, Any] | None = None, source: StartingModel | None = None, **more: Any
) -> str:
    manifest = amended(Manifest.default_demo(), changes or {})
    result = replace(RESULT, **more)
    return model_card(manifest, result, source or StartingModel(), tokenizer=True)


def head(text: str) -> dict[str, Any]:
    mark, yaml_head, _ = text.split("---\n", 2)
    assert mark == ""
    return yaml.safe_load(yaml_head)


def test_the_head_is_what_the_hub_reads() -> None:
    assert head(card(FINEWEB)) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": ["HuggingFaceFW/fineweb-edu"],
        "tags": ["tutti", "decentralized-training"],
    }
    source = StartingModel("Qwen/Qwen3-0.6B", (("license", "apache-2.0"),))
    found = head(card({"model.adapter": 4}, source))
    assert found["base_model"] == "Qwen/Qwen3-0.6B"
    assert found["base_model_relation"] == "adapter"
    assert found["license"] == "apache-2.0"
    assert found["library_name"] == "peft"
    assert "lora" in found["tags"]
    assert head(card({}, source))["base_model_relation"] == "finetune"


def test_the_license_is_left_to_the_owner_unless_the_source_states_one() -> None:
    assert "license" not in head(card())
    assert "# license: name the one you publish this model under" in card()
    assert "# license" not in card({}, StartingModel("", (("license", "mit"),)))


def test_the_body_names_run_version_tokens_losses_and_data() -> None:
    text = card({**FINEWEB, "data.sha256": "cd" * 32})
    for said in (
        "| Version | epoch 120 of ",
        f"lineage `{'ab' * 16}`",
        "| Tokens | 41,200,000 |",
        "| Training loss | 1.5000 nats per token, perplexity 4.48 |",
        "| Held-out loss | 1.7500 nats per token, perplexity 5.75 |",
        f"`{FINEWEB['data.source']}`, sha256 `{'cd' * 32}`",
        f"`{amended(Manifest.default_demo(), {**FINEWEB, 'data.sha256': 'cd' * 32}).run_id}`",
        "AutoModelForCausalLM.from_pretrained(path)",
        "AutoTokenizer.from_pretrained(path)",
    ):
        assert said in text, said
    assert "| Held-out loss | not measured |" in card(loss_val=0.0)
    assert "perplexity" not in card(loss=30.0, loss_val=0.0)
    assert "lineage" not in card(version=Version(0))


def test_losses_stand_beside_those_before_the_first_step() -> None:
    text = card(before=Losses(4.0, 3.5))
    assert (
        "| Training loss | 1.5000 nats per token, perplexity 4.48; before the first step "
        "4.0000 nats per token, perplexity 54.60 |"
    ) in text
    assert "perplexity 5.75; before the first step 3.5000 nats per token" in text
    assert "not measured; before the first step 3.5000" in card(
        before=Losses(4.0, 3.5), loss_val=0.0
    )
    assert "before the first step" not in card()
    assert card(before=Losses(4.0, 0.0)).count("before the first step") == 1


def test_only_names_on_the_hub_are_named_as_data_sets() -> None:
    for source in ("file:book.txt", "builtin:pydoc", "https://host/SHA256SUMS", "hf:/home/me/set"):
        text = card({"data.source": source})
        assert "datasets" not in head(text)
        assert f"| Data | `{source}` |" in text


def test_nothing_of_the_manifest_is_read_as_markdown() -> None:
    text = card({"data.source": "file:a`|b](http://x).txt"})
    (row,) = [line for line in text.splitlines() if line.startswith("| Data")]
    assert row == "| Data | `file:a \\|b](http://x).txt` |"


def test_adapters_say_what_they_are_loaded_on() -> None:
    text = card({"model.adapter": 4})
    assert "LoRA adapters of rank 4" in text
    assert "peft.PeftModel.from_pretrained(base" in text
    assert "DIRECTORY OF THE MODEL THAT THE RUN BEGAN FROM" in text
    assert 'from_pretrained("Qwen/Qwen3-0.6B")' in card(
        {"model.adapter": 4}, StartingModel("Qwen/Qwen3-0.6B")
    )


def test_weights_are_named_by_their_digests() -> None:
    stages = Manifest.default_demo().pipeline.stages
    named = [f"blake3:{stage:064x}" for stage in range(stages + 1)]
    text = card({"model.weights": named}, StartingModel("org/model"))
    assert "| Began from | `org/model`, weights with the BLAKE3 digests `" in text
    assert f"`{stages:064x}`" in text


def test_the_name_of_a_model_in_the_hubs_cache_is_known(tmp_path: Path) -> None:
    there = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "0123abc"
    there.mkdir(parents=True)
    assert source_in(str(there)) == StartingModel("Qwen/Qwen3-0.6B")
    assert source_in(str(there.parent)) == StartingModel()
    assert source_in(str(tmp_path)) == StartingModel()
    assert source_in(str(tmp_path / "missing")) == StartingModel()
    assert source_in("") == StartingModel()
    other = tmp_path / "models--a--b--c" / "snapshots" / "x"
    other.mkdir(parents=True)
    assert source_in(str(other)) == StartingModel()


@pytest.mark.parametrize(
    ("text", "license"),
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# Model\n", (("license", "apache-2.0"),)),
        (
            "---\r\nlicense: other\r\nlicense_name: qwen\r\nlicense_link: https://x\r\n---\r\n",
            (("license", "other"), ("license_name", "qwen"), ("license_link", "https://x")),
        ),
        ("---\nlicense: [mit]\n---\n", ()),
        ("# Model\nlicense: mit\n", ()),
        ("---\nlicense: mit\n", ()),
        ("---\n: : {\n---\n", ()),
        ("---\n- a\n---\n", ()),
        ("---\n" + "[" * 5000 + "\n---\n", ()),
        ("---\nlicense: !!python/object/apply:os.system [ls]\n---\n", ()),
    ],
)
def test_a_license_is_what_the_head_of_the_source_states(
    tmp_path: Path, text: str, license: tuple[tuple[str, str], ...]
) -> None:
    (tmp_path / "README.md").write_bytes(text.encode())
    assert source_in(str(tmp_path)).license == license


def test_a_card_that_is_no_text_states_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert source_in(str(tmp_path)) == StartingModel()
