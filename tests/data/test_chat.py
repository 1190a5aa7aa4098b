"""Conversations in five published formats, against their text written out by hand."""

import json
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F

from node.core.errors import UsageFault
from node.data import chat
from node.data.chat import BadTemplate, Misfit, Template, conversations, looks_like_chat
from node.data.confined import process
from node.data.confined.process import ParseFault
from node.data.marks import CONTEXT, LAST, Conversation, ids_in
from node.data.order import SampleOrder
from node.data.readers import LeftOut, RowFormat, json_lines
from node.data.settings import OWN_MANIFEST, DataSettings
from node.data.sources import Corpus, open_data, open_source
from node.data.tokenizer import ByteTokenizer, FileTokenizer, document_ids
from node.data.tokenizer_files import TokenizerFiles
from node.model.documents import NO_TARGET, UNTRAINED
from node.model.settings import ModelSettings
from node.model.stages import Ends
from node.stage.text import Text, pair
from tests.data.streamed import listed

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
QWEN = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}"
    "{% if loop.index0 > ns.asked %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOL = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
SMOL += CHATML
BLOCKS = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
)
TALK = [
    {"role": "user", "content": "What is naïve 🤖?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA robot."},
    {"role": "user", "content": "And two?"},
    {"role": "assistant", "content": "Robots."},
]


def reference(name: str) -> list[list[tuple[str, bool]]]:
    """Documents of TALK in parts, and whether each is trained on, written out."""
    ask, answer, again, last = (m["content"] for m in TALK)
    short = "A robot."
    im = "<|im_start|>{}\n{}<|im_end|>\n"
    head = "<|im_start|>assistant\n"
    if name in ("chatml", "smol"):
        start = im.format("system", "Be kind") if name == "smol" else ""
        return [[
            (start + im.format("user", ask) + head, False), (f"{answer}<|im_end|>\n", True),
            (im.format("user", again) + head, False), (f"{last}<|im_end|>\n", True),
        ]]  # fmt: skip
    if name == "llama":
        header = "<|start_header_id|>{}<|end_header_id|>\n\n"
        user = header.format("user")
        assistant = header.format("assistant")
        return [[
            (f"<s>{user}{ask}<|eot_id|>{assistant}", False), (f"{answer}<|eot_id|>", True),
            (f"{user}{again}<|eot_id|>{assistant}", False), (f"{last}<|eot_id|>", True),
        ]]  # fmt: skip
    if name == "mistral":
        return [[
            (f"<s>[INST] {ask} [/INST]", False), (f" {answer}</s>", True),
            (f"[INST] {again} [/INST]", False), (f" {last}</s>", True),
        ]]  # fmt: skip
    if name == "blocks":
        return [[
            (f"user: {ask}\nassistant: ", False), (f"{answer}</s>", True),
            (f"\nuser: {again}\nassistant: ", False), (f"{last}</s>", True), ("\n", False),
        ]]  # fmt: skip
    first = im.format("user", ask) + head
    return [  # the second answer does not see the thoughts before the first
        [(first, False), (f"{answer}<|im_end|>\n", True)],
        [(f"{first}{short}<|im_end|>\n" + im.format("user", again) + head, False),
         (f"<think>\n\n</think>\n\n{last}<|im_end|>\n", True)],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> FileTokenizer:
    """A tokenizer that learnt the words of the templates and of TALK."""
    rust = tokenizers.Tokenizer(tokenizers.models.BPE())
    rust.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*special, "<|end_header_id|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    rust.train_from_iterator(["assistant user system", *(m["content"] for m in TALK)] * 4, trainer)
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    rust.save(str(path))
    return FileTokenizer(path)


TEMPLATES = {
    "chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN, "smol": SMOL,
    "blocks": BLOCKS,
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_masks_and_losses_are_those_of_the_reference(words, name):
    found = conversations({"messages": TALK}, "text", Template(TEMPLATES[name], SPECIAL))
    expected = reference(name)
    assert [c.text for c in found] == ["".join(t for t, _ in parts) for parts in expected]
    rust = tokenizers.Tokenizer.from_str(words.to_json().decode())
    ends = Ends(ModelSettings(layers=1, d_model=16, heads=2, kv_heads=2, d_ff=16, vocab=320,
                              seq_len=8))  # fmt: skip
    for conversation, parts in zip(found, expected, strict=True):
        encoding = rust.encode(conversation.text, add_special_tokens=False)
        letters = [trained for text, trained in parts for _ in text]
        labels = [
            i if letters[begin] else -100
            for i, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True)
        ]
        ids = document_ids(conversation, words, words.eos)
        tokens, targets = pair(ids.astype(np.int64)[None], LAST, marked=True)
        assert tokens[0].tolist() == encoding.ids[:-1]
        assert [t if t >= 0 else -100 for t in targets[0].tolist()] == labels[1:]
        assert (targets == UNTRAINED).any()
        assert not (targets == NO_TARGET).any(), "the end of the document is not inside it"
        h = torch.randn(1, len(labels) - 1, 16)
        total, count = ends.loss(h, targets)
        logits = ends.logits(h)
        wanted = F.cross_entropy(logits[0], torch.tensor(labels[1:]), reduction="mean")
        torch.testing.assert_close(total / count, wanted)


def test_documents_behind_each_other_are_kept_apart(words):
    one = Conversation("What robot", ((5, 10),))
    rows = np.concatenate([document_ids(one, words, None)] * 2).astype(np.int64)[None]
    length = rows.shape[1] // 2
    _, targets = pair(rows, LAST, marked=True)
    assert (targets[0] == NO_TARGET).nonzero().tolist() == [[length - 1]]
    _, targets = pair(rows, None, marked=True)
    assert targets[0, length - 1] == UNTRAINED, "the first token of a question"


def test_a_prompt_and_completion_without_a_template_end_in_the_tokenizers_end():
    (found,) = conversations({"prompt": "é?", "completion": "ja"}, "text", None)
    assert found == Conversation("é?ja", ((2, 4),), open=True)
    ids = document_ids(found, ByteTokenizer(), 257)
    assert ids_in(ids).tolist() == [0xC3, 0xA9, ord("?"), ord("j"), ord("a"), 257]
    assert [bool(i & CONTEXT) for i in ids] == [True] * 3 + [False] * 3
    assert [bool(i & LAST) for i in ids] == [False] * 5 + [True]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversation": [{"role": "user", "content": "a", "name": None},
                          {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]},
        {"messages": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'},
        {"prompt": "a", "completion": "b"},
        {"prompt": [{"role": "user", "content": "a"}],
         "completion": [{"role": "assistant", "content": "b"}]},
    ],
)  # fmt: skip
def test_forms_of_rows_are_the_same_conversation(row):
    (found,) = conversations(row, "text", Template(CHATML, {}))
    ((start, stop),) = found.trained
    assert found.text[:start].endswith("a<|im_end|>\n<|im_start|>assistant\n")
    assert found.text[start:stop] == "b<|im_end|>\n"
    field = next(iter(row))
    if "prompt" not in row:
        assert conversations({"talk": row[field]}, "talk", Template(CHATML, {})) == [found]


def test_earlier_answers_of_a_prompt_are_context():
    row = {"prompt": TALK[:3], "completion": TALK[3:]}
    (found,) = conversations(row, "text", Template(CHATML, {}))
    assert [found.text[a:b] for a, b in found.trained] == ["Robots.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"body": "x"}, "no messages in 'messages' or 'conversations'; its fields are body"),
        ({"messages": []}, "a conversation without messages"),
        ({"messages": {"role": "user"}}, "no list"),
        ({"messages": [3]}, "no object"),
        ({"messages": [{"content": "a"}]}, "without a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "without a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts that are no"),
        ({"messages": TALK[:1]}, "no turn of the assistant"),
        ({"messages": TALK[1:]}, "roles must alternate"),
        ({"conversations": [{"from": "martian", "value": "a"}]}, "from 'martian'"),
        ({"messages": "[[["}, "messages that are no JSON"),
        ([1], "no object"),
    ],
)
def test_rows_that_are_no_conversations_say_why(row, says):
    with pytest.raises(Misfit, match=says):
        conversations(row, "text", Template(MISTRAL, SPECIAL))


def test_a_template_whose_answers_do_not_begin_where_its_prompt_ends_is_refused():
    other = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    with pytest.raises(Misfit, match="nobody can tell what the assistant wrote"):
        conversations({"messages": TALK}, "text", Template(other, {}))
    with pytest.raises(Misfit, match="no chat template"):
        conversations({"messages": TALK}, "text", None)


def test_a_conversation_that_would_take_too_long_is_left_out(monkeypatch):
    many = TALK * (chat.MOST_MESSAGES // 4) + TALK
    with pytest.raises(Misfit, match="more than 1000 messages"):
        conversations({"messages": many}, "text", Template(CHATML, {}))
    monkeypatch.setattr(chat, "MOST_RENDERED", 100)
    with pytest.raises(Misfit, match="too many turns"):
        conversations({"messages": TALK}, "text", Template(CHATML, {}))


def test_messages_and_pairs_look_like_chat_and_text_does_not():
    assert looks_like_chat({"messages": TALK})
    assert looks_like_chat({"prompt": "a", "completion": "b"})
    assert not looks_like_chat({"text": "a", "messages": TALK})
    assert not looks_like_chat({"body": "a"})


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", Misfit),
        ("{% for i in range(10**5) %}{{ 'x' * 100 }}{% endfor %}", Misfit),
        ("{{ messages.append(1) }}", Misfit),
        ("{{ ''.__class__.__mro__ }}", Misfit),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", Misfit),
        ("{% include '/etc/passwd' %}", Misfit),
        ("{% endfor %}", BadTemplate),
        ("x" * (chat.MOST_TEMPLATE + 1), BadTemplate),
        ("{{ m" + "|trim" * 200 + " }}", BadTemplate),
        ("{% autoescape 1 + 1 %}{% endautoescape %}", BadTemplate),
        ("{{ 1e999 }}", Misfit),
    ],
)
def test_a_template_of_a_stranger_is_kept_in(template, fault):
    with pytest.raises(fault):
        Template(template, {}).render(TALK)


CONSTANTS = (
    "{{{{ {} }}}}",
    "{{% if {} %}}{{% endif %}}",
    "{{% for i in [{}] %}}{{% endfor %}}",
    "{{% set a = {} %}}",
    "{{% macro a(b={}) %}}{{% endmacro %}}",
    "{{{{ messages[{}] | trim }}}}",
)
"""Places of a template where jinja2 can compute a constant while it compiles."""


@pytest.mark.parametrize("place", CONSTANTS)
@pytest.mark.parametrize("large", ["'a' * 10 ** 7", "'a' | center(10 ** 7)", "'%9999999d' % 1"])
def test_a_large_constant_takes_no_memory_before_it_is_rendered(place, large):
    tracemalloc.start()
    try:
        Template(place.format(large), {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10**7


@pytest.mark.parametrize("place", CONSTANTS)
def test_a_constant_that_nobody_can_compute_is_no_work_before_it_is_rendered(monkeypatch, place):
    monkeypatch.setattr(process, "CPU_S", 1)
    left = LeftOut("a.jsonl")
    assert rendered(place.format("9 ** (9 ** 9)"), b"{}", left) == []
    assert "no messages" in left.said


def test_a_format_of_a_stranger_names_no_type():
    assert Template("{{ '{0.__class__}'.format(messages) }}", {}).render(TALK) == ""


def test_dates_are_the_same_for_all_peers():
    assert Template("{{ strftime_now('%Y-%m-%d') }}", {}).render(TALK) == "2024-07-26"


def rendered(template: str, raw: bytes, left: LeftOut) -> list:
    form = RowFormat(chat=True, template=template, special=tuple(SPECIAL.items()))
    return list(json_lines(form.parsers(), raw, form, "a.jsonl", left))


def test_rows_are_written_in_a_confined_process():
    left = LeftOut("a.jsonl")
    good = b'{"prompt": "a", "completion": "b"}'
    found = rendered(MISTRAL, good + b'\n{"messages": null}\nnonsense\n', left)
    assert found == [Conversation("<s>[INST] a [/INST] b</s>", ((19, 25),))]
    assert (left.given, left.reasons.total()) == (1, 2)


def test_a_template_that_does_not_end_is_ended_by_the_kernel(monkeypatch):
    monkeypatch.setattr(process, "CPU_S", 1)
    loops = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
    row = b'{"messages": [{"role": "assistant", "content": "b"}]}'
    with pytest.raises(ParseFault, match="more than 1 s of processor time"):
        rendered(loops, row, LeftOut("a.jsonl"))


def test_a_bad_template_is_a_fault_of_the_run():
    with pytest.raises(UsageFault, match="chat template cannot be read"):
        rendered("{% endfor %}", b"{}", LeftOut("a.jsonl"))


def test_default_rows_keep_the_names_of_caches():
    assert RowFormat().key == ""
    assert replace(RowFormat(), column="body").key != replace(RowFormat(), chat=True).key != ""


def test_a_file_of_conversations_becomes_masked_samples(tmp_path, words):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(9)))
    (tmp_path / "tokenizer.json").write_bytes(words.to_json())
    template = {"chat_template.jinja": CHATML.encode()}
    settings = DataSettings(
        source=f"file:{path}", rows="chat", document_mask=True, holdout=0.0,
        tokenizer=str(tmp_path / "tokenizer.json"),
    )  # fmt: skip

    def opened() -> Corpus:
        files = partial(TokenizerFiles, template)
        home = tmp_path / "home"
        return open_data(settings, 8, 1 << 22, home, OWN_MANIFEST, files)[0]

    corpus = opened()
    assert (corpus.marked, corpus.end, corpus.train.dtype) == (True, LAST, np.uint32)
    text = Text(corpus, SampleOrder(corpus.windows, 1), corpus.windows)
    tokens, targets = text.at(range(corpus.windows))
    (one,) = conversations({"messages": TALK}, "text", Template(CHATML, {}))
    ids = document_ids(one, words, None)
    every = np.asarray(corpus.train)
    assert (every == np.tile(ids, 9)).all()
    assert int((every & LAST != 0).sum()) == 9
    assert int((targets >= 0).sum()) == int(
        (every[1 : 8 * corpus.windows + 1] & CONTEXT == 0).sum()
    )
    assert int(tokens.max()) < words.vocab
    before = sorted(p.name for p in (tmp_path / "home" / "data").iterdir())
    assert np.array_equal(np.asarray(opened().train), every)
    assert sorted(p.name for p in (tmp_path / "home" / "data").iterdir()) == before
    template["chat_template.jinja"] = SMOL.encode()  # another text, and another cache
    assert len(opened().train) > len(every)


def test_text_and_ids_are_no_conversations(tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "b.txt").write_text("text")
    for source in ("builtin:pydoc", "synthetic:1", f"file:{tmp_path}/web/"):
        settings = DataSettings(source=source, rows="chat")
        with pytest.raises(UsageFault, match="(pydoc|1|b.txt) is plain text"):
            open_data(settings, 4, 1 << 22, tmp_path / "home", OWN_MANIFEST)
    settings = DataSettings(source=f"file:{listed(tmp_path / 'web')}", rows="chat", windows=1)
    with pytest.raises(UsageFault, match="b.txt is plain text"):
        open_source(settings, 4, 1 << 22, tmp_path / "home", OWN_MANIFEST)
    for name in ("a.txt", "a.bin"):
        (tmp_path / name).write_bytes(b"text of two bytes a token")
        settings = DataSettings(source=f"file:{tmp_path / name}", rows="chat")
        with pytest.raises(UsageFault, match="plain text|no conversations"):
            open_data(settings, 4, 1 << 22, tmp_path, OWN_MANIFEST)
