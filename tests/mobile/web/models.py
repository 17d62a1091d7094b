"""A tiny model for pages: random weights, drafts that stand, and a tokenizer of 48 characters."""

import string
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.models import EagleHead, Network
from jaxspec.tuning import AcceptanceTable, identity_of
from tests.mobile.models import CONFIG, successor_model

CAPACITY = 1024
TREES = (((0,), (0, 0)), ((0,), (1,), (0, 0), (0, 1)), ((0,), (0, 0), (0, 0, 0)))
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '.' }}"
    "{% endfor %}a:"
)
CHARACTERS = string.ascii_lowercase + string.digits + " :.,?'()+-*/"


def page_model() -> tuple[Model, EagleHead]:
    """`successor_model` for longer texts, one token per character of `CHARACTERS`."""
    model, head = successor_model()
    vocabulary = {"Ġ" if each == " " else each: at for at, each in enumerate(CHARACTERS)}
    assert len(vocabulary) == CONFIG.vocab_size
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    network = Network(model.network.params, CONFIG.replace(max_positions=CAPACITY))
    return Model(network, Tokenizer(backend, {}, {"default": TEMPLATE}), "successors"), head


def table_of(head: EagleHead, rates: Sequence[float] = (0.6, 0.2, 0.05)) -> AcceptanceTable:
    """Made up, in the name of a head."""
    return AcceptanceTable(
        (tuple(rates),) * 5, head=identity_of(head), source="made up for the tests"
    )
