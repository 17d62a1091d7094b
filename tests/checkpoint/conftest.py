"""Tiny networks and tokenizers, made on the spot."""

from pathlib import Path

import pytest

from jaxspec.checkpoint import Model, Tokenizer, save
from jaxspec.models import ModelConfig, Network
from tests.checkpoint.networks import random_network


@pytest.fixture(scope="session")
def tiny_network() -> Network:
    config = ModelConfig(
        vocab_size=48,
        embed_dim=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=24,
        max_positions=64,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
    return random_network(config)


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    """The 256 bytes, a few merges and two special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat, the cat sat"] * 3, trainer)
    backend.add_tokens(["<think>"])
    as_in_old_files = {"__type": "AddedToken", "content": "</s>"}
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": as_in_old_files})


@pytest.fixture(scope="session")
def sentence_piece_tokenizer() -> Tokenizer:
    """The form of Llama-2's tokenizer: `▁` for a space, bytes spelled out when all else fails."""
    tokenizers = pytest.importorskip("tokenizers")
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "a", "b", "c", "▁a", "bc", "▁▁"]
    vocab = {
        token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *spelled, *pieces])
    }
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab,
            [("▁", "a"), ("b", "c"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture
def saved_folder(tmp_path: Path, tiny_network: Network) -> Path:
    """A tiny Llama in the Hugging Face layout, without a tokenizer."""
    save(Model(tiny_network, stop_token_ids=(3,)), tmp_path / "tiny")
    return tmp_path / "tiny"
