"""Trainers for models with tokenizers that were not made here."""

import dataclasses
import json

import jax
import pytest

import jaxspec
from jaxspec.checkpoint import Model, load, load_dflash, save
from jaxspec.models import Network, init_params
from jaxspec.training.deer import DeerTrainer
from jaxspec.training.dflash import DFlashTrainer
from jaxspec.training.eagle import EagleTrainer
from jaxspec.training.lm import LMTrainer
from jaxspec.training.masked import MaskedTrainer
from jaxspec.training.settings import (
    DeerTrainingSettings,
    DFlashTrainingSettings,
    EagleTrainingSettings,
    LMTrainingSettings,
    MaskedTrainingSettings,
)
from jaxspec.training.sources import DataError, Document, LastRows, Source
from jaxspec.training.train import train
from jaxspec.training.vocabulary import TrainingVocabulary
from tests.foreign import LIKE, TEXTS, like_llama3, like_qwen, special
from tests.training.runs import CONFIG, DRAFTING, QUIET

PADDED = {"qwen": 290}
"""Ids of a model, where they are more than its tokenizer's."""


@pytest.mark.parametrize(
    ("name", "opening", "mask", "separator", "end"),
    [
        ("qwen", [], 289, 288, "<|im_end|>"),
        (
            "llama3",
            ["<|begin_of_text|>"],
            "<|reserved_special_token_2|>",
            "<|reserved_special_token_1|>",
            "<|end_of_text|>",
        ),
        ("llama2", ["<s>"], "<unk>", None, "</s>"),
    ],
)
def test_ids_with_a_meaning_are_found(name, opening, mask, separator, end):
    tokenizer = LIKE[name]()
    vocabulary = TrainingVocabulary.of(tokenizer, name, PADDED.get(name))

    def index(token):
        return tokenizer.token_id(token) if isinstance(token, str) else token

    assert vocabulary.opening == tuple(map(index, opening))
    assert vocabulary.mask == index(mask)
    assert vocabulary.separator == index(separator)
    assert vocabulary.end == index(end)
    [ids] = vocabulary.encode([Document(("3 and 4 </s><|im_end|>",), {}, "a")])
    inner = ids[len(opening) : -1].tolist()
    assert not set(inner) & {vocabulary.mask, vocabulary.end, *vocabulary.opening}
    assert tokenizer.decode(inner).strip() == "3 and 4 </s><|im_end|>"


def test_tokens_of_that_name_come_first_and_live_ones_never():
    tokenizer = like_llama3()
    tokenizer.backend.add_special_tokens(special("[MASK]", "[SEP]"))
    vocabulary = TrainingVocabulary.of(tokenizer, "a")
    assert vocabulary.mask == tokenizer.token_id("[MASK]")
    assert vocabulary.separator == tokenizer.token_id("[SEP]")
    live = like_llama3()
    live.backend.add_tokens(["[MASK]"])  # text may hold it
    assert TrainingVocabulary.of(live, "a").mask == live.token_id("<|reserved_special_token_2|>")


def test_a_drafters_own_mask_is_not_taken_for_the_separator():
    vocabulary = TrainingVocabulary.of(like_qwen(), "a", PADDED["qwen"])
    assert dataclasses.replace(vocabulary, given_mask=288).separator == 289


def test_another_models_tokenizer_is_refused(tmp_path):
    like_qwen().write(tmp_path)
    (tmp_path / "other").mkdir()
    like_llama3().write(tmp_path / "other")
    with pytest.raises(ValueError, match="its ids mean something else there"):
        TrainingVocabulary.of_folder(str(tmp_path), str(tmp_path / "other"))


def test_what_is_missing_is_named():
    tokenizer = like_qwen()
    with pytest.raises(ValueError, match="tokenizer of here has no token that ends a text"):
        TrainingVocabulary.of(dataclasses.replace(tokenizer, settings={}), "here")
    with pytest.raises(ValueError, match=r"no mask token, and no id to spare .* add the token \["):
        TrainingVocabulary.of(tokenizer, "here").needed("mask")
    with pytest.raises(ValueError, match="and the model only 100"):
        TrainingVocabulary.of(tokenizer, "here", 100)
    turns = Document(
        ("", "<|user|>", "2?", "<|end|>", "", "<|assistant|>", "2", "<|end|>", ""), {}, "f:3"
    )
    with pytest.raises(DataError, match=r"f:3: the text has turns, .* no chat template"):
        TrainingVocabulary.of(like_llama3(), "here").encode([turns])
    for changed, message in (
        ({0: "Hi"}, "has 'Hi' outside of them"),
        ({3: "[SEP]"}, r"has '\[SEP\]' outside of them"),
        ({2: "2<|im_end|>"}, r"a turn holds the special token '<\|im_end\|>'"),
    ):
        wrong = [changed.get(index, piece) for index, piece in enumerate(turns.pieces)]
        with pytest.raises(DataError, match=message):
            TrainingVocabulary.of(tokenizer, "here").encode([turns._replace(pieces=tuple(wrong))])
    [ids] = TrainingVocabulary.of(tokenizer, "here").encode([turns])
    assert ids.tolist().count(tokenizer.token_id("<|im_end|>")) == 2
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>")


def test_ids_are_added_where_none_is_to_spare():
    full = TrainingVocabulary.of(like_qwen(), "here")
    size = full.size
    assert (full.mask, full.separator) == (None, None)
    more = full.with_masks()
    assert (more.size, more.mask, more.separator) == (size + 2, size + 1, size)
    llama2 = TrainingVocabulary.of(LIKE["llama2"](), "here").with_masks()
    assert llama2.size == llama2.tokenizer.vocab_size + 1
    assert len({llama2.mask, llama2.separator, None}) == 3
    padded = TrainingVocabulary.of(like_qwen(), "here", 290)
    assert padded.with_masks() is padded


@pytest.fixture(scope="module", params=["qwen", "llama3"])
def target(request, tmp_path_factory):
    """A target with random weights and its tokenizer, and the text that trainers read."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = LIKE[request.param]()
    size = PADDED.get(request.param, tokenizer.vocab_size)
    config = CONFIG.replace(vocab_size=size, qk_norm=request.param == "qwen")
    network = Network(init_params(config, jax.random.key(0)), config)
    save(
        Model(network, tokenizer, stop_token_ids=(tokenizer.eos_id,)), folder / "target", "float32"
    )
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder, Source("sums", str(path), split=LastRows(8))


SHORT = {**DRAFTING, "num_steps": 6}
MODELS = {name: SHORT[name] for name in SHORT if name not in ("own_text", "decoding_prompts")}
"""Settings of a short run of any trainer of models."""


def assert_same_text(folder, drafter) -> None:
    config = jaxspec.GenerationConfig(max_new_tokens=12)
    model = load(folder / "target")
    plain = jaxspec.generate(model, "3 and 4", config)
    fast = jaxspec.generate(model, "3 and 4", config, drafter)
    assert fast[0].tokens.tolist() == plain[0].tokens.tolist()


def test_an_eagle_head_is_trained(target):
    folder, source = target
    settings = EagleTrainingSettings((source,), str(folder / "target"), version=1, **SHORT)
    train(EagleTrainer(settings), folder / "e", folder / "eagle", console=QUIET)
    head = jaxspec.load_eagle(folder / "eagle", load(folder / "target").network)
    assert_same_text(folder, jaxspec.Eagle.of(head, ((0,), (0, 0))))


def test_a_dflash_head_is_trained(target):
    folder, source = target
    settings = DFlashTrainingSettings(
        (source,), str(folder / "target"), layers=1, taps=(0, 1), block=4, anchors=4, **SHORT
    )
    train(DFlashTrainer(settings), folder / "f", folder / "dflash", console=QUIET)
    head = load_dflash(folder / "dflash", load(folder / "target").network)
    vocabulary = TrainingVocabulary.of_model(load(folder / "target"), "target")
    assert head.mask_token_id == vocabulary.mask
    assert_same_text(folder, jaxspec.DFlash.of(head))


@pytest.mark.parametrize("block", [0, 4])
def test_a_drafter_of_blocks_is_made_from_the_target_and_aligned(target, tmp_path, block):
    folder, source = target
    start = MaskedTrainingSettings(
        (source,), start_from=str(folder / "target"), block=block, **MODELS
    )
    train(MaskedTrainer(start), tmp_path / "m", tmp_path / "masked", console=QUIET)
    vocabulary = TrainingVocabulary.of_model(load(folder / "target"), "target")
    assert load(tmp_path / "masked").config.masking.mask_token_id == vocabulary.mask
    one = DeerTrainingSettings(
        (source,),
        str(folder / "target"),
        str(tmp_path / "masked"),
        block=4,
        texts=str(folder / "texts"),
        **SHORT,
    )
    train(DeerTrainer(one), tmp_path / "s1", tmp_path / "one", console=QUIET)
    two = dataclasses.replace(one, stage=2, longest=4, start_from=str(tmp_path / "one"))
    train(DeerTrainer(two), tmp_path / "s2", tmp_path / "two", console=QUIET)
    drafter = load(tmp_path / "two")
    assert drafter.config.masking.separator == (None if block else vocabulary.separator)
    assert drafter.stop_token_ids == load(folder / "target").stop_token_ids
    assert_same_text(folder, jaxspec.Deer.of(drafter, block=4))


def test_a_drafter_gets_rows_for_mask_and_separator(target, tmp_path):
    """The model's every id is in use."""
    _, source = target
    tokenizer = like_qwen()
    size = tokenizer.vocab_size
    config = CONFIG.replace(vocab_size=size)
    model = Model(Network(init_params(config, jax.random.key(1)), config), tokenizer)
    model = dataclasses.replace(model, stop_token_ids=(tokenizer.eos_id,))
    save(model, tmp_path / "target", "float32")
    start = MaskedTrainingSettings((source,), start_from=str(tmp_path / "target"), **MODELS)
    train(MaskedTrainer(start), tmp_path / "m", tmp_path / "masked", console=QUIET)
    settings = DeerTrainingSettings(
        (source,),
        str(tmp_path / "target"),
        str(tmp_path / "masked"),
        block=4,
        texts=str(tmp_path / "texts"),
        **SHORT,
    )
    train(DeerTrainer(settings), tmp_path / "s", tmp_path / "deer", console=QUIET)
    drafter = load(tmp_path / "deer")
    assert drafter.vocab_size == size + 2
    assert {drafter.config.masking.mask_token_id, drafter.config.masking.separator} == {
        size,
        size + 1,
    }
    assert_same_text(tmp_path, jaxspec.Deer.of(drafter, block=4))


def test_a_model_of_the_hub_is_fetched(target, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    folder, source = target
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(folder / "target"))
    settings = MaskedTrainingSettings((source,), start_from="someone/model", block=4, **MODELS)
    train(MaskedTrainer(settings), tmp_path / "m", tmp_path / "masked", console=QUIET)
    assert load(tmp_path / "masked").config.masking.block == 4
    eagle = EagleTrainingSettings((source,), "someone/model", version=1, **SHORT)
    train(EagleTrainer(eagle), tmp_path / "e", tmp_path / "eagle", console=QUIET)
    assert "someone/model" in (tmp_path / "eagle" / "recipe.md").read_text()


def test_a_draft_model_learns_from_the_target(target, tmp_path):
    folder, source = target
    settings = LMTrainingSettings(
        (source,),
        CONFIG.replace(num_layers=1, layer_types=("full",)),
        teacher=str(folder / "target"),
        **MODELS,
    )
    train(LMTrainer(settings), tmp_path / "s", tmp_path / "draft", console=QUIET)
    draft = load(tmp_path / "draft")
    assert draft.vocab_size == load(folder / "target").vocab_size
    assert_same_text(folder, jaxspec.DraftModel.of(draft))


def test_a_model_is_trained_further_in_its_own_shape(target, tmp_path):
    folder, source = target
    settings = LMTrainingSettings((source,), start_from=str(folder / "target"), **MODELS)
    train(LMTrainer(settings), tmp_path / "s", tmp_path / "further", console=QUIET)
    further, before = load(tmp_path / "further"), load(folder / "target")
    assert further.config == before.config
    assert further.stop_token_ids == before.stop_token_ids
    assert further.tokenizer.encode("3 and 4") == before.tokenizer.encode("3 and 4")
    longer = dataclasses.replace(settings, sequence_length=128)
    with pytest.raises(ValueError, match=r"positions of start_from \(64\), got 128"):
        train(LMTrainer(longer), tmp_path / "longer", console=QUIET)


def test_answers_alone_need_turns_that_tokens_mark(target, tmp_path):
    folder, source = target
    settings = MaskedTrainingSettings(
        (source,), start_from=str(folder / "target"), answers_only=True, **MODELS
    )
    with pytest.raises(ValueError, match="answers_only needs a tokenizer made by"):
        train(MaskedTrainer(settings), tmp_path / "s", console=QUIET)
