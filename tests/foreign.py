"""Tokenizers like those of published models, made from a few texts."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxspec.checkpoint.tokenizer import Tokenizer as Loaded
from jaxspec.training.tokenizer import BYTE_ALPHABET

TEXTS = [f"{a} and {b} make {a + b}" for a in range(9) for b in range(9)]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=BYTE_ALPHABET, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def like_qwen() -> Loaded:
    """Byte-level BPE without bos; no token to spare, but the model's vocabulary is padded."""
    backend = byte_level()
    backend.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return Loaded(backend, {"eos_token": "<|im_end|>"}, {"default": CHATML})


def like_llama3() -> Loaded:
    """Byte-level BPE with bos, and reserved tokens."""
    backend = byte_level()
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(3)]
    backend.add_special_tokens(special("<|begin_of_text|>", "<|end_of_text|>", *reserved))
    begin = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin[0]} $A", special_tokens=[begin]
    )
    return Loaded(backend, {"bos_token": begin[0], "eos_token": "<|end_of_text|>"})


def like_llama2() -> Loaded:
    """SentencePiece's kind: every byte has a token, so the unknown one is free."""
    words = {word for text in TEXTS for word in text.split()}
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *sorted({letter for word in words for letter in word})]
    backend = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(special("<unk>", "<s>", "</s>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return Loaded(backend, {"bos_token": "<s>", "eos_token": "</s>"})


LIKE = {"qwen": like_qwen, "llama3": like_llama3, "llama2": like_llama2}
