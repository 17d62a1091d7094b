"""The tokens of any model that training gives a meaning: ends of text, masks, separators, turns."""

import dataclasses
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxspec.checkpoint import Model, find_model
from jaxspec.checkpoint.folder import read_folder
from jaxspec.checkpoint.tokenizer import Tokenizer, covers, failing, load_tokenizer
from jaxspec.training.sources import DataError, Document
from jaxspec.training.tokenizer import (
    BOS,
    END_OF_TURN,
    MASK,
    RESERVED,
    ROLES,
    SEPARATOR,
    is_made_here,
    stop_ids,
    without_reserved,
)

_MASKS = (MASK, "<|mask|>", "<mask>", "<|mdm_mask|>", "<|MASK|>")
_SEPARATORS = (SEPARATOR, "<|sep|>", "<sep>")
_SPARE = re.compile(r"reserved|unused|extra_id|control_\d|placeholder|dummy", re.IGNORECASE)
"""Names of tokens that published tokenizers keep for whoever needs one."""


class Turns(NamedTuple):
    """Ids that mark the turns of a conversation.

    Attributes:
        roles: ids that begin a turn.
        assistant: the one of them that begins an answer.
        end: id that ends a turn.
    """

    roles: tuple[int, ...]
    assistant: int
    end: int


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingVocabulary:
    """A model's tokenizer, and the ids that training needs beside those of text.

    Attributes:
        tokenizer: the model's tokenizer.
        size: ids of the model; those past the tokenizer's are padding, and have no text.
        stops: ids that end a text; documents end with the first.
        given_mask: the mask, where a drafter has one already; `None`: it is looked for.
    """

    tokenizer: Tokenizer
    size: int
    stops: tuple[int, ...]
    given_mask: int | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        origin: str,
        size: int | None = None,
        stops: Sequence[int] = (),
    ) -> "TrainingVocabulary":
        """Returns the vocabulary of a model.

        Args:
            tokenizer: its tokenizer.
            origin: where it comes from, for messages.
            size: ids of the model; `None`: as many as the tokenizer has.
            stops: ids that end its texts, as `Model.stop_token_ids`; the tokenizer's own end comes
                first, where it names one.

        Raises:
            ValueError: nothing ends a text, or the model has fewer ids than its tokenizer.
        """
        size = tokenizer.vocab_size if size is None else size
        if size < tokenizer.vocab_size:
            raise ValueError(
                f"The tokenizer of {origin} has {tokenizer.vocab_size} ids, and the model only "
                f"{size}: give the tokenizer that it was trained with."
            )
        own = tokenizer.eos_id
        if is_made_here(tokenizer.backend):
            own, stops = stop_ids()[0], [*dict.fromkeys((*stop_ids(), *stops))]
        ends = (*stops,) if own is None else (own, *(stop for stop in stops if stop != own))
        if not ends:
            raise ValueError(
                f"The tokenizer of {origin} has no token that ends a text: name its eos_token in "
                "tokenizer_config.json, or its eos_token_id in generation_config.json."
            )
        return cls(tokenizer, size, ends)

    @classmethod
    def of_model(cls, model: Model, origin: str) -> "TrainingVocabulary":
        """Returns the vocabulary of a model that has a tokenizer; see `of`."""
        assert model.tokenizer is not None  # checked by the caller
        return cls.of(model.tokenizer, origin, model.vocab_size, model.stop_token_ids)

    @classmethod
    def of_folder(cls, folder: str, tokenizer: str | None = None) -> "TrainingVocabulary":
        """Returns the vocabulary of a model in the Hugging Face layout, without its weights.

        Args:
            folder: folder of the model, or its owner/name on the Hub.
            tokenizer: folder with its tokenizer; `None`: the same.
        """
        path = find_model(folder)
        model = read_folder(path)
        loaded = load_tokenizer(tokenizer or path)
        if tokenizer is not None and model.tokenizer is not None:
            own = load_tokenizer(path)
            if not (covers(loaded, own) or covers(own, loaded)):
                raise ValueError(
                    f"tokenizer: that of {tokenizer} differs from that of {folder}, so its ids "
                    "mean something else there: give the tokenizer that it was trained with."
                )
        sizes = (model.config, model.config.get("text_config") or {})
        size = next((int(each["vocab_size"]) for each in sizes if "vocab_size" in each), None)
        return cls.of(loaded, tokenizer or folder, size, model.stop_token_ids(loaded.eos_id, size))

    @property
    def end(self) -> int:
        """Id that ends a document."""
        return self.stops[0]

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts in front of a text: bos, or nothing."""
        if is_made_here(self.tokenizer.backend):
            return (RESERVED.index(BOS),)
        whole = self.tokenizer.encode("a")
        inner = self.tokenizer.encode("a", special_tokens=False)
        before = whole.index(inner[0]) if inner and inner[0] in whole else 0
        return tuple(whole[:before])

    @cached_property
    def turns(self) -> Turns | None:
        """Marks of turns; `None`: chats are a template's, as the tokenizer was not made here."""
        if not is_made_here(self.tokenizer.backend):
            return None
        roles = tuple(RESERVED.index(f"<|{role}|>") for role in ROLES)
        assistant = RESERVED.index("<|assistant|>")
        return Turns(roles, assistant, RESERVED.index(END_OF_TURN))

    @cached_property
    def mask(self) -> int | None:
        """Id of the mask: a token of that name, or one that no text uses; `None`: there is none."""
        if self.given_mask is not None:
            return self.given_mask
        named = self._named("mask_token", _MASKS)
        return next(iter(self._spare), None) if named is None else named

    @cached_property
    def separator(self) -> int | None:
        """Id of the separator, likewise; never the mask's."""
        named = self._named("sep_token", _SEPARATORS)
        named = None if named == self.mask else named
        spare = (index for index in self._spare if index != self.mask)
        return next(spare, None) if named is None else named

    def with_masks(self) -> "TrainingVocabulary":
        """Returns the vocabulary with an id more for the mask and for the separator, if missing."""
        missing = (self.mask is None) + (self.separator is None)
        return dataclasses.replace(self, size=self.size + missing) if missing else self

    def needed(self, name: str) -> int:
        """Returns `mask` or `separator`.

        Raises:
            ValueError: the tokenizer has neither a token of that name nor one to spare.
        """
        index = getattr(self, name)
        if index is None:
            raise ValueError(
                f"The tokenizer has no {name} token, and no id to spare for one (reserved "
                f"or unused tokens, ids past the tokenizer's): add the token "
                f"{'[MASK]' if name == 'mask' else '[SEP]'} to its tokenizer.json, marked special, "
                "and a row for it to the model's embedding."
            )
        return index

    @cached_property
    def _spare(self) -> tuple[int, ...]:
        """Ids that no text uses: reserved tokens from the last, padding, and an unknown token."""
        if is_made_here(self.tokenizer.backend):
            return ()
        named = {self.tokenizer.token_id(text) for text in self.tokenizer.special_tokens.values()}
        used = named | set(self.stops) | set(self.opening)
        added = self.tokenizer.backend.get_added_tokens_decoder()
        reserved = [
            index
            for index, token in sorted(added.items(), reverse=True)
            if token.special and _SPARE.search(token.content) and index not in used
        ]
        padding = range(self.size - 1, self.tokenizer.vocab_size - 1, -1)
        unknown = json.loads(self.tokenizer.backend.to_str())["model"]
        # With a token for every byte, nothing in a text is unknown.
        name = unknown.get("unk_token") if unknown.get("byte_fallback") else None
        index = None if name is None else self.tokenizer.token_id(name)
        lasts = () if index is None or index in self.stops else (index,)
        return (*reserved, *padding, *lasts)

    def _named(self, setting: str, names: Sequence[str]) -> int | None:
        """Returns the id of a special token by what the settings, or published models, call it."""
        special = self.tokenizer.special_ids
        asked = self.tokenizer.special_tokens.get(setting)
        for name in ([] if asked is None else [asked]) + list(names):
            index = self.tokenizer.token_id(name)
            if index is not None and index in special and index not in self.stops:
                return index
        return None

    def encode(self, documents: Sequence[Document]) -> list[Int[np.ndarray, " tokens"]]:
        """Returns the ids of every document: what opens a text, its tokens, and the end.

        Special tokens inside a text are ordinary characters. A document with turns is rendered by
        the chat template, if the tokenizer was not made here; there they are refused.

        Raises:
            DataError: a document has turns, and the tokenizer no chat template; or it has marks
                that are no turns, text outside of them, or a turn that holds a special token.
        """
        plain = without_reserved(self.tokenizer.backend)
        texts = [piece for document in documents for piece in document.pieces[::2]]
        with failing("The tokenizer.json cannot encode the sources' texts"):
            encoded = iter(plain.encode_batch(texts, add_special_tokens=False))
        ids = []
        for document in documents:
            parts = [next(encoded).ids for _ in document.pieces[::2]]
            if len(parts) > 1 and self.turns is None:
                tokens = self._chat(document)
            else:
                marks = [[RESERVED.index(piece)] for piece in document.pieces[1::2]]
                tokens = [*self.opening, *parts[0]]
                for mark, part in zip(marks, parts[1:], strict=True):
                    tokens += mark + part
            if self.end not in tokens[-2:]:  # a template may put a line feed behind it
                tokens.append(self.end)
            ids.append(np.asarray(tokens, np.int32))
        return ids

    def _chat(self, document: Document) -> list[int]:
        """Returns the ids of a document with turns, by the chat template."""
        if not self.tokenizer.templates:
            raise DataError(
                f"{document.place}: the text has turns, and the tokenizer has no chat "
                "template: leave this source out (--data names others), or put a "
                "chat_template.jinja into the model's folder."
            )
        messages, outside = [], [document.pieces[0]]
        for mark, text in zip(document.pieces[1::2], document.pieces[2::2], strict=True):
            role = mark.removeprefix("<|").removesuffix("|>")
            if role in ROLES:
                messages.append({"role": role, "content": text})
            else:
                outside += [text] if mark == END_OF_TURN else [mark]
        if "".join(outside).strip():
            raise DataError(
                f"{document.place}: a chat of this tokenizer is made of turns alone, and the "
                f"source's template has {''.join(outside).strip()!r:.60} outside of them."
            )
        for message in messages:
            read = self.tokenizer.encode(message["content"], special_tokens=False)
            if found := self.tokenizer.special_ids.intersection(read):
                token = self.tokenizer.backend.id_to_token(min(found))
                raise DataError(
                    f"{document.place}: a turn holds the special token {token!r}, which would be "
                    "read as one; take it out of the text."
                )
        return self.tokenizer.encode_chat(messages, add_generation_prompt=False)
