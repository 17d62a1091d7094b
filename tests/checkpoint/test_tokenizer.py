import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from jaxspec.checkpoint import (
    CheckpointError,
    Tokenizer,
    load_tokenizer,
    shipped_models,
    templates,
)
from jaxspec.checkpoint.tokenizer import failing

KINDS = ("byte_level_tokenizer", "sentence_piece_tokenizer")
CHAT = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture(params=KINDS)
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


def with_template(tokenizer: Tokenizer, template: str, name: str = "default") -> Tokenizer:
    return Tokenizer(tokenizer.backend, tokenizer.settings, {name: template})


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_and_bytes_make_up_the_decoded_text(kind, request):
    tokenizer = request.getfixturevalue(kind)
    table = tokenizer.token_bytes()

    @settings(max_examples=40)
    @given(st.text(max_size=20).filter(lambda text: "\ufffd" not in text), st.booleans())
    def check(text, start):
        ids = [tokenizer.bos_id] * start + tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        stream = tokenizer.detokenizer()
        assert "".join([stream.push([token_id]) for token_id in ids]) + stream.finish() == whole
        spelled = b"".join(table[token_id] for token_id in ids).decode()
        assert spelled.removeprefix(" " if kind == KINDS[1] else "") == whole

    check()


def test_text_given_out_is_never_taken_back(byte_level_tokenizer):
    @settings(max_examples=60)
    @given(st.lists(st.integers(0, byte_level_tokenizer.vocab_size - 1), max_size=24))
    def check(ids):
        stream = byte_level_tokenizer.detokenizer()
        pieces = [stream.push([token_id]) for token_id in ids]
        assert not any(piece.endswith("\ufffd") for piece in pieces)
        assert "".join(pieces) + stream.finish() == byte_level_tokenizer.decode(ids)

    check()


def test_half_a_character_is_held_back(byte_level_tokenizer):
    first, second, third = byte_level_tokenizer.encode("€")
    stream = byte_level_tokenizer.detokenizer()
    assert [stream.push([first]), stream.push([second]), stream.push([third])] == ["", "", "€"]
    assert stream.push([first]) == ""
    assert stream.finish() == "\ufffd"


def test_leading_spaces_of_later_words_are_streamed(sentence_piece_tokenizer):
    eos, a = sentence_piece_tokenizer.eos_id, sentence_piece_tokenizer.token_id("▁a")
    stream = sentence_piece_tokenizer.detokenizer()
    assert [stream.push([token_id]) for token_id in (a, eos, a, a)] == ["a", "", " a", " a"]


def test_special_tokens_have_bytes_only_when_asked_for(tokenizer):
    assert tokenizer.token_bytes()[tokenizer.eos_id] == b""
    assert tokenizer.token_bytes(skip_special_tokens=False)[tokenizer.eos_id] == b"</s>"


def test_an_added_token_that_is_not_special_is_text(byte_level_tokenizer):
    think = byte_level_tokenizer.token_id("<think>")
    assert byte_level_tokenizer.token_bytes()[think] == b"<think>"
    assert byte_level_tokenizer.decode([think]) == "<think>"
    assert think not in byte_level_tokenizer.special_ids


def test_bytes_of_other_tokenizers_are_refused(byte_level_tokenizer):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer(backend).token_bytes()


def test_ids_by_name(tokenizer):
    assert tokenizer.bos_id == tokenizer.token_id("<s>")
    assert tokenizer.eos_id == tokenizer.token_id("</s>")
    assert tokenizer.pad_id is None
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_written_tokenizer_is_read_back(tokenizer, tmp_path):
    templates = {"default": "{{ messages|length }}", "rag": "{{ documents|length }}"}
    Tokenizer(tokenizer.backend, tokenizer.settings, templates).write(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode("a cat") == tokenizer.encode("a cat")
    assert again.special_tokens == tokenizer.special_tokens
    assert again.templates == templates
    assert again.render_chat(CHAT, template="rag", documents=[{}, {}]) == "2"


def test_a_model_may_share_the_tokenizer_of_one_that_ships(byte_level_tokenizer, tmp_path):
    if "demo" not in shipped_models():
        pytest.skip("needs checkpoints/demo, which is not here")
    (tmp_path / "config.json").write_text('{"shared_tokenizer": "demo"}')
    text = "Two and two"
    shared = load_tokenizer(shipped_models()["demo"])
    assert load_tokenizer(tmp_path).encode(text) == shared.encode(text)
    byte_level_tokenizer.write(tmp_path)
    assert load_tokenizer(tmp_path).encode(text) == byte_level_tokenizer.encode(text)


@pytest.mark.parametrize("name", ["../demo", "demo-skips", "no-such-model", 3])
def test_a_shared_tokenizer_is_that_of_a_shipped_model(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"shared_tokenizer": name}))
    with pytest.raises(CheckpointError, match=r"config.json: shared_tokenizer must .*, got "):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_in_the_file_are_not_applied(byte_level_tokenizer, tmp_path):
    byte_level_tokenizer.write(tmp_path)
    file = tmp_path / "tokenizer.json"
    length = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation": length}))
    text = "the cat sat on the mat"
    assert load_tokenizer(tmp_path).encode(text) == byte_level_tokenizer.encode(text)


def test_a_template_sees_messages_tokens_and_further_variables(tokenizer):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% generation %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% endfor %}{% if add_generation_prompt and thinking %}go{% endif %}"
    )
    chat = with_template(tokenizer, template)
    assert chat.render_chat(CHAT, thinking=True) == "<s>[assistant] Hello</s>go"
    assert chat.render_chat(CHAT, add_generation_prompt=False) == "<s>[assistant] Hello</s>"
    # The template wrote the special tokens: encoding must not add them a second time.
    assert chat.encode_chat(CHAT)[0] == tokenizer.bos_id
    assert chat.encode_chat(CHAT).count(tokenizer.bos_id) == 1


def test_tools_choose_their_own_template(tokenizer):
    templates = {"default": "plain", "tool_use": "{{ tools[0].name }}"}
    chat = Tokenizer(tokenizer.backend, tokenizer.settings, templates)
    assert chat.render_chat(CHAT) == "plain"
    assert chat.render_chat(CHAT, tools=[{"name": "clock"}]) == "clock"
    assert chat.render_chat(CHAT, tools=[{"name": "clock"}], template="default") == "plain"


def test_json_in_templates_is_not_escaped_for_html(tokenizer):
    rendered = with_template(tokenizer, "{{ messages[0]|tojson }}").render_chat(CHAT)
    assert rendered == '{"role": "user", "content": "Hi <b>"}'


def test_the_date_is_there(tokenizer):
    assert with_template(tokenizer, "{{ strftime_now('%Y') }}").render_chat(CHAT).isdigit()


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace(__html__='called'.upper) %}{{ ns|escape }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 // 0 }}",
        "{% if %}",
    ],
)
def test_a_template_that_refuses_fails_or_reaches_out_is_an_error(tokenizer, template):
    with pytest.raises(CheckpointError, match="chat template"):
        with_template(tokenizer, template).render_chat(CHAT)


def test_a_refusal_is_passed_on(tokenizer):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CheckpointError, match="roles must alternate"):
        with_template(tokenizer, template).render_chat(CHAT)


@pytest.mark.parametrize("call", ["raise_exception", "[].index"])
def test_a_long_refusal_is_cut(byte_level_tokenizer, call):
    wordy = with_template(byte_level_tokenizer, "{{ " + call + "('no' * 10 ** 7) }}")
    with pytest.raises(CheckpointError) as raised:
        wordy.render_chat(CHAT)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda it: it.encode(None), "text must be a text, got None"),
        (lambda it: it.encode("a" * 10**8), "at most 4194304 bytes in UTF-8, got 100000000; give"),
        (lambda it: it.decode([-1]), r"ids\[0\] must be at least 0, got -1"),
        (lambda it: it.decode([1 << 40]), r"ids\[0\] must be below 2147483648"),
        (lambda it: it.decode(5), "ids must be a sequence, got 5"),
        (lambda it: it.render_chat(CHAT, template=[1]), r"template must be a text, got \[1\]"),
        (lambda it: it.render_chat([5 * "x"]), r"messages\[0\] must be a dictionary"),
    ],
)
def test_what_is_of_another_type_is_named(byte_level_tokenizer, call, message):
    with pytest.raises(ValueError, match=message):
        call(with_template(byte_level_tokenizer, "x"))


GREEDY_TEMPLATES = {
    "turns": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product": "{{ 'a' * 10 ** 10 }}",
    "joins": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "lists": "{% set n = namespace(x=['a']) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}"
    "{% endfor %}{{ n.x }}",
    "width": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "printed": "{% for a in range(99999) %}{{ 'b' * 9999 }}{% endfor %}",
    "calls": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
}


@pytest.mark.parametrize("name", GREEDY_TEMPLATES)
def test_a_template_that_takes_too_much_is_an_error_in_time(byte_level_tokenizer, name):
    greedy = with_template(byte_level_tokenizer, "{{ bos_token }}\n" + GREEDY_TEMPLATES[name])
    began = time.monotonic()
    said = "chat template 'default' refused these messages in its line 2"
    with pytest.raises(CheckpointError, match=said):
        greedy.render_chat(CHAT)
    assert time.monotonic() - began < 30
    assert with_template(byte_level_tokenizer, "next").render_chat(CHAT) == "next"


def test_long_chats_take_no_longer_than_they_may(tokenizer):
    template = (
        "{% for m in messages %}{{ '<|' ~ m.role + '|>' }}"
        "{{ m.content|trim|replace('\n', '\n\n') }}"
        "{% if not loop.last %}{{ loop.length }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word\n" * 1000}] * 1000
    assert len(with_template(tokenizer, template).render_chat(messages)) > 5_000_000


def test_forked_processes_render_by_themselves(byte_level_tokenizer, monkeypatch):
    chat = with_template(byte_level_tokenizer, "{{ messages|length }}")
    assert chat.render_chat(CHAT) == "2"
    parents = templates._PROCESS._running()
    monkeypatch.setattr(templates._PROCESS, "_owner", -1)
    assert chat.render_chat(CHAT[:1]) == "1"
    assert templates._PROCESS._running() is not parents
    assert parents.poll() is None
    parents.kill()
    parents.communicate()


def test_an_interrupted_chat_leaves_no_answer_to_the_next(byte_level_tokenizer, monkeypatch):
    chat = with_template(byte_level_tokenizer, "{{ messages|length }}")
    assert chat.render_chat(CHAT) == "2"

    class Interrupted:
        def readline(self):
            raise KeyboardInterrupt

        def close(self):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(templates._PROCESS._running(), "stdout", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            chat.render_chat(CHAT)
    assert chat.render_chat(CHAT[:1]) == "1"


def test_an_id_that_no_table_holds_is_refused(byte_level_tokenizer, tmp_path):
    byte_level_tokenizer.write(tmp_path)
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text())
    described["added_tokens"].append({**described["added_tokens"][0], "content": "<far>"})
    described["added_tokens"][-1]["id"] = 2**31 - 2
    described["model"]["vocab"]["<far>"] = 2**31 - 2
    file.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"has ids up to 2147483646, .* below 1048576"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_or_template_that_is_too_large_is_not_read(byte_level_tokenizer, tmp_path):
    byte_level_tokenizer.write(tmp_path)
    for name in ("chat_template.jinja", "tokenizer.json"):
        with (tmp_path / name).open("ab") as stream:
            stream.truncate(1 << 28)  # without its bytes on the disk
        with pytest.raises(CheckpointError, match=f"{name} is larger than .* MiB"):
            load_tokenizer(tmp_path)


def test_an_error_of_a_template_names_its_line(tokenizer):
    for wrong in ("{{ raise_exception('no') }}", "{{ 1 + 'a' }}", "{% for %}"):
        with pytest.raises(CheckpointError, match="in its line 3"):
            with_template(tokenizer, f"{{# 1 #}}\n\n{wrong}").render_chat(CHAT)


def test_chat_without_a_template_is_an_error(tokenizer):
    with pytest.raises(CheckpointError, match="no chat template"):
        tokenizer.render_chat(CHAT)
    with pytest.raises(CheckpointError, match=r"\['rag'\], got 'default'"):
        with_template(tokenizer, "x", name="rag").render_chat(CHAT)


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, ["hi"], [{"content": "hi"}]])
def test_messages_of_the_wrong_form_are_an_error(tokenizer, messages):
    with pytest.raises(ValueError, match="messages"):
        with_template(tokenizer, "x").render_chat(messages)


def test_messages_that_are_not_plain_json_are_an_error(tokenizer):
    with pytest.raises(ValueError, match="plain JSON"):
        with_template(tokenizer, "x").render_chat([{"role": "user", "content": object()}])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda given: given.encode("x", special_tokens="no"), "special_tokens must be True or"),
        (lambda given: given.decode([5], skip_special_tokens="no"), "skip_special_tokens must be"),
        (lambda given: given.detokenizer("no"), "skip_special_tokens must be True or False"),
        (lambda given: given.detokenizer().push([-1]), r"ids\[0\] must be at least 0, got -1"),
        (lambda given: given.detokenizer().push([2**40]), r"ids\[0\] must be below"),
        (lambda given: given.detokenizer().push(None), "ids must be a sequence, got None"),
        (lambda given: given.detokenizer().push("a"), "ids must be a sequence, got 'a'"),
        (lambda given: given.token_id(5), "token must be a text, got 5"),
        (lambda given: given.write(None), "folder must be a text or a path, got None"),
        (lambda given: given.render_chat(CHAT, tools="abc"), "tools must be a sequence, got 'abc'"),
        (
            lambda given: given.render_chat(CHAT, add_generation_prompt="abc"),
            "add_generation_prompt must be True or False, got 'abc'",
        ),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(byte_level_tokenizer, call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(with_template(byte_level_tokenizer, "x"))


def test_a_folder_may_be_a_text(byte_level_tokenizer, tmp_path):
    byte_level_tokenizer.write(str(tmp_path))
    assert load_tokenizer(tmp_path).encode("x") == byte_level_tokenizer.encode("x")


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "Nonsense"}}'])
def test_a_damaged_tokenizer_is_an_error(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_a_panic_of_the_library_is_an_error(byte_level_tokenizer, tmp_path):
    byte_level_tokenizer.write(tmp_path)
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    # A search that takes too long, of which the library panics.
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated"}
    path.write_text(json.dumps(described | {"pre_tokenizer": split | {"invert": False}}))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot encode this text: .*retry"):
        tokenizer.encode("a" * 50 + "b")
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(described | {"normalizer": charsmap}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)


def test_an_interruption_of_the_library_stays_one():
    with pytest.raises(KeyboardInterrupt), failing("said"):
        raise KeyboardInterrupt


def test_templates_listed_in_the_settings_are_named(byte_level_tokenizer, tmp_path):
    byte_level_tokenizer.write(tmp_path)
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert load_tokenizer(tmp_path).templates == {"default": "a", "tool_use": "b"}
    # A file of its own wins over the settings.
    (tmp_path / "chat_template.jinja").write_text("c")
    assert load_tokenizer(tmp_path).templates == {"default": "c", "tool_use": "b"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "chat_template must be a text or a sequence, got 5"),
        (False, "chat_template must be a text or a sequence, got False"),
        ({"name": "a", "template": "b"}, "chat_template must be a text or a sequence"),
        ([1], r"chat_template\[0\] must be a mapping, got 1"),
        ([{"name": "a"}], r"chat_template\[0\]: template must be a text, got None"),
        ([{"name": "a", "template": 5}], r"chat_template\[0\]: template must be a text, got 5"),
    ],
)
def test_a_template_of_another_type_is_named(value, message, byte_level_tokenizer, tmp_path):
    byte_level_tokenizer.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {message}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["/evil", "../evil", "..", ""])
def test_a_template_is_no_path(name, byte_level_tokenizer, tmp_path):
    byte_level_tokenizer.write(tmp_path)
    listed = [{"name": name, "template": "a"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    with pytest.raises(CheckpointError, match=r"chat_template\[0\]: name must be the name of"):
        load_tokenizer(tmp_path)


def test_a_text_that_has_no_ids_is_an_error():
    words = Backend(models.WordLevel({"one": 0}, unk_token="[UNK]"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot encode this text"):
        Tokenizer(words, {}, {}).encode("two")


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("tokenizer.json", 64),
        ("tokenizer_config.json", 16),
        ("chat_template.jinja", 16),
        ("additional_chat_templates/rag.jinja", 16),
    ],
)
def test_files_that_no_tokenizer_has_are_refused(byte_level_tokenizer, tmp_path, name, most):
    byte_level_tokenizer.write(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 1 << 40)  # takes no room on the disk
    with pytest.raises(CheckpointError, match=rf"{name} is larger than {most} MiB"):
        load_tokenizer(tmp_path)


def test_templates_in_devices_and_other_encodings_are_refused(byte_level_tokenizer, tmp_path):
    byte_level_tokenizer.write(tmp_path)
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"rag\.jinja is a device or a pipe"):
        load_tokenizer(tmp_path)
    (folder / "rag.jinja").unlink()
    (folder / "rag.jinja").write_bytes(b"fine\n\xff")
    with pytest.raises(CheckpointError, match=r"rag\.jinja:2: not UTF-8 text"):
        load_tokenizer(tmp_path)
