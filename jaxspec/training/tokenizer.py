"""The tokenizer of models trained here: byte-level BPE, single digits, reserved ids in front."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxspec.checkpoint.tokenizer import MOST_IDS
from jaxspec.checkpoint.tokenizer import Tokenizer as Loaded

BOS = "<|bos|>"
EOS = "<|eos|>"
PAD = "<|pad|>"
MASK = "[MASK]"
SEPARATOR = "[SEP]"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant")

# Ids are positions in this tuple. All kinds of models find their tokens here, so that they can
# share one tokenizer.
RESERVED = (
    BOS,
    EOS,
    PAD,
    MASK,
    SEPARATOR,
    *(f"<|{role}|>" for role in ROLES),
    END_OF_TURN,
    *(f"<|reserved_{index}|>" for index in range(7)),
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('A role must be system, user or assistant, got ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Learns merges from `texts`; the same texts in the same order give the same tokenizer.

    Args:
        texts: training text; reserved tokens inside it are ordinary characters.
        vocab_size: most entries, reserved ids and the 256 bytes included. There are fewer where
            the texts hold no further pair to merge.

    Raises:
        ValueError: `vocab_size` is below the number of reserved ids and bytes, or above
            `MOST_IDS`, the most that is loaded.

    >>> train_tokenizer(["one and one"], 300).get_vocab_size() <= 300
    True
    """
    smallest = len(RESERVED) + len(BYTE_ALPHABET)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size must be at least {smallest} ({len(RESERVED)} reserved ids and "
            f"{len(BYTE_ALPHABET)} bytes), got {vocab_size}."
        )
    if vocab_size > MOST_IDS:
        raise ValueError(f"vocab_size must be at most {MOST_IDS}, got {vocab_size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(RESERVED),
        initial_alphabet=BYTE_ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, RESERVED.index(BOS))]
    )
    return tokenizer


def stop_ids() -> list[int]:
    """Returns the ids that end a text or a turn, for `generation_config.json`."""
    return [RESERVED.index(EOS), RESERVED.index(END_OF_TURN)]


def without_reserved(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a copy that reads reserved tokens in a text as ordinary characters.

    So data cannot forge a turn or an end of text.
    """
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = True
    return copy


def is_made_here(tokenizer: Tokenizer) -> bool:
    """Returns True if a tokenizer has the reserved ids of `RESERVED`."""
    return tuple(tokenizer.id_to_token(index) for index in range(len(RESERVED))) == RESERVED


def loaded_tokenizer(tokenizer: Tokenizer, max_positions: int) -> Loaded:
    """Returns a tokenizer made here as `load_tokenizer` gives it, chat template included.

    Args:
        tokenizer: the tokenizer.
        max_positions: longest text of its model, in tokens.
    """
    settings = {
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "mask_token": MASK,
        "sep_token": SEPARATOR,
    }
    return Loaded(tokenizer, settings, {"default": CHAT_TEMPLATE})
