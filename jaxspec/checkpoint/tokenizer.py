"""`tokenizer.json` and chat templates: from text and chats to ids, and from ids to text."""

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.checkpoint.files import (
    MOST_JSON,
    CheckpointError,
    as_path,
    given,
    is_file_name,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    write_json,
)
from jaxspec.checkpoint.folder import TOKENIZER, read_folder
from jaxspec.checkpoint.templates import TemplateFailure, render
from jaxspec.core.checks import Natural, checked, checks_arguments, shown

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not a whole character
Message = Mapping[str, Any]

_MOST_BYTES = 1 << 26  # the largest published ones have 35 MB
MOST_TEXT_BYTES = 1 << 22  # libraries take up to 400 bytes and 2 microseconds for each
MOST_IDS = 1 << 20  # tables have an entry for each id; published vocabularies have 300,000


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer and what its folder says about special tokens and chats.

    Attributes:
        backend: does the splitting; complete in itself (normaliser, merges, added tokens, bos).
        settings: the contents of `tokenizer_config.json`, chat templates excepted.
        templates: chat templates by name; the usual one is "default".

    Example:
        >>> tokenizer = load_tokenizer("checkpoints/demo")
        >>> tokenizer.decode(tokenizer.encode("Two and two"))
        'Two and two'
    """

    backend: "tokenizers.Tokenizer"
    settings: Mapping[str, Any] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} ids)"

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. A network's own vocabulary may be padded beyond it."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Text of the named special tokens, by name: `bos_token`, `eos_token`, ..."""
        return {
            name: _token_text(value)
            for name, value in self.settings.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }

    @property
    def bos_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_id(self) -> int | None:
        return self._named_id("pad_token")

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out unless asked for: all tokens marked special in the file."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @checks_arguments
    def token_id(self, token: str) -> int | None:
        """Returns the id of a token, spelled as in the vocabulary, or `None`."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text.

        Args:
            text: any string of up to `MOST_TEXT_BYTES` bytes in UTF-8.
            special_tokens: add what the tokenizer puts around a text, usually bos. Turn it off for
                a rendered chat, which carries its own.

        Raises:
            ValueError: it is no text or too long, or half of a surrogate pair is in it, which no
                tokenizer reads.
            CheckpointError: the tokenizer has no id for a part of the text.
        """
        size = check_unicode(checked("text", text, str), "text")
        if size > MOST_TEXT_BYTES:
            raise ValueError(
                f"text must have at most {MOST_TEXT_BYTES} bytes in UTF-8, got {size}; give it in "
                "parts."
            )
        special_tokens = checked("special_tokens", special_tokens, bool)
        with failing("The model's tokenizer.json cannot encode this text"):
            return self.backend.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids. Ids outside the vocabulary have no text.

        Raises:
            ValueError: `ids` is no sequence of whole numbers from 0.
        """
        ids = checked("ids", ids, Sequence[Natural])
        skip_special_tokens = checked("skip_special_tokens", skip_special_tokens, bool)
        with failing("The model's tokenizer.json cannot decode these ids"):
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> "Detokenizer":
        """Decodes one text whose ids arrive piece by piece."""
        return Detokenizer(self, skip_special_tokens)

    def token_bytes(self, skip_special_tokens: bool = True) -> list[bytes]:
        """Returns what each id adds to a text, as UTF-8 bytes; empty for ids that add nothing.

        The bytes of a text are those of its tokens in order, except that tokenizers of the
        SentencePiece kind drop one space at the very beginning.

        Raises:
            CheckpointError: the decoder is neither byte-level nor of the SentencePiece kind.
        """
        to_bytes = _decoder_of(json.loads(self.backend.to_str()))
        table = [b""] * self.vocab_size
        skipped = self.special_ids if skip_special_tokens else frozenset()
        for token, token_id in self.backend.get_vocab(with_added_tokens=True).items():
            if token_id not in skipped:
                table[token_id] = to_bytes(token)
        return table

    @property
    def drops_first_space(self) -> bool:
        """True where a space that a text begins with is not in what `decode` returns."""
        spelled = self.token_bytes()
        spaces = (token for token, text in enumerate(spelled) if re.fullmatch(rb" [a-z]*", text))
        space, letter = next(spaces, None), self.token_id("a")
        if space is None or letter is None:
            return False
        return not self.decode([space, letter]).startswith(" ")

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """Renders a conversation as the text that its model was trained on.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on, oldest first.
            add_generation_prompt: end with the opening of the assistant's turn.
            template: which of `templates`; `None`: "tool_use" where there is one and tools are
                given, else "default".
            tools: JSON schemas of functions that the model may call.
            documents: texts to answer from, for templates that know them.
            extra: further variables of the template, such as `enable_thinking` for Qwen3.

        Raises:
            CheckpointError: there is no such template, or it fails on or refuses the messages.
            ValueError: `messages` is not a list of dictionaries of plain JSON values with a role,
                or another argument has a wrong type.
        """
        add_generation_prompt = checked("add_generation_prompt", add_generation_prompt, bool)
        tools = checked("tools", tools, Sequence[Mapping[str, Any]] | None)
        documents = checked("documents", documents, Sequence[Mapping[str, Any]] | None)
        if template is None:
            template = "tool_use" if tools and "tool_use" in self.templates else "default"
        source = self._template(given("template", template, str))
        _check_messages(messages)
        variables = _plain_json(
            {
                **self.special_tokens,
                "messages": messages,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **extra,
            }
        )
        try:
            return render(source, variables)
        except TemplateFailure as failure:
            where = "" if failure.line is None else f" in its line {failure.line}"
            if failure.refused:
                raise CheckpointError(
                    f"The chat template {template!r} refused these messages{where}: {failure}"
                ) from None
            raise CheckpointError(
                f"The chat template {template!r} failed on these messages{where} ({failure}): "
                "see whether it needs other keys or further variables."
            ) from None

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Returns the ids of a rendered conversation; options as for `render_chat`.

        Raises:
            CheckpointError: as for `render_chat` and `encode`.
            ValueError: as for both of them.
        """
        return self.encode(self.render_chat(messages, **options), special_tokens=False)

    def write(self, folder: str | Path) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json` and the templates.

        Raises:
            CheckpointError: `folder` can be no path.
        """
        folder = as_path("folder", folder)
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=False), encoding="utf-8")
        # Readers of the original layout look for a class here; this one means "use tokenizer.json".
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings}
        write_json(folder / "tokenizer_config.json", settings)
        for name, source in self.templates.items():
            path = folder / "chat_template.jinja"
            if name != "default":
                path = folder / "additional_chat_templates" / f"{name}.jinja"
                path.parent.mkdir(exist_ok=True)
            path.write_text(source, encoding="utf-8")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)

    def _template(self, name: str) -> str:
        if not self.templates:
            raise CheckpointError(
                "This tokenizer has no chat template, so chat messages cannot be rendered: pass "
                "plain text, or put a chat_template.jinja into the model's folder."
            )
        if name not in self.templates:
            raise CheckpointError(
                f"template must be one of {sorted(self.templates)}, got {shown(name)}."
            )
        return self.templates[name]


class Detokenizer:
    """Text from ids that arrive piece by piece; what was given out is never taken back.

    Characters made of several tokens are held back until they are whole. For valid text the pieces
    joined are exactly what `decode` gives for all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = checked("skip_special_tokens", skip_special_tokens, bool)
        # Only a window is decoded again: `_context` ids that were whole text before the last piece
        # (some decoders treat the first token of a text differently), then the later ones.
        self._window: list[int] = []
        self._context = 0
        self._num_shown = 0

    def push(self, ids: Sequence[int]) -> str:
        """Adds ids; returns the text that they complete.

        Raises:
            ValueError: `ids` is no sequence of whole numbers from 0.
        """
        self._window.extend(checked("ids", ids, Sequence[Natural]))
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        piece = whole[self._num_shown :]
        self._num_shown = max(self._num_shown, len(whole))
        if piece and whole == text:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._num_shown = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """Returns the text still held back, incomplete characters as U+FFFD."""
        piece = self._decode(self._window)[self._num_shown :]
        self._window, self._context, self._num_shown = [], 0, 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        backend = self._tokenizer.backend
        return backend.decode(ids, skip_special_tokens=self._skip_special_tokens)


@functools.lru_cache(maxsize=16)
def covers(theirs: Tokenizer, ours: Tokenizer) -> bool:
    """Says whether all our tokens have the same ids in theirs, with no other token between them."""
    if theirs is ours:
        return True
    target = ours.backend.get_vocab()
    drafter = theirs.backend.get_vocab()
    added = [index for token, index in drafter.items() if token not in target]
    return target.items() <= drafter.items() and min(added, default=len(target)) >= len(target)


def check_unicode(text: str, name: str) -> int:
    """Returns the number of a text's bytes in UTF-8.

    Half a surrogate pair is refused: what undecodable bytes and broken JSON escapes become.

    Raises:
        ValueError: saying where it is.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode: {text[error.start]!r} at character {error.start} is "
            "half of a surrogate pair; decode the bytes it came from as UTF-8."
        ) from None


@contextlib.contextmanager
def failing(said: str) -> Iterator[None]:
    """Raises whatever the tokenizers library raises as a `CheckpointError` that begins so."""
    try:
        yield
    except BaseException as error:
        # It has no class of its own, and a panic inside of it is no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{said}: {error}") from error


def read_backend(path: Path) -> "tokenizers.Tokenizer":
    """Reads a `tokenizer.json`.

    Raises:
        CheckpointError: it is too large or cannot be understood.
    """
    import tokenizers

    described = read_bytes(path, _MOST_BYTES)
    with failing(f"{path} cannot be read as a tokenizer"):
        return tokenizers.Tokenizer.from_buffer(described)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Reads `tokenizer.json`, and the settings and chat templates next to it, if any.

    The drafters and diffusion models that ship share the tokenizer of `demo`, as their config.json
    says.

    Raises:
        CheckpointError: there is no `tokenizer.json`, a file is too large or cannot be understood,
            or `folder` can be no path.

    Example:
        >>> from jaxspec.checkpoint import load_tokenizer, shipped_models
        >>> len(load_tokenizer(shipped_models()["demo"]).encode("Two and two"))
        5
    """
    folder = as_path("folder", folder)
    found = read_folder(folder).tokenizer
    if found is None:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, so text cannot be encoded: pass token ids, or put "
            "the model's tokenizer.json there. A tokenizer.model is converted by transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    folder, path = found, found / TOKENIZER
    backend = read_backend(path)
    # Both are left over from training in some files, and would silently change prompts.
    backend.no_truncation()
    backend.no_padding()
    place, settings = _read_settings(folder)
    templates = _read_templates(folder, settings.pop("chat_template", None), place)
    tokenizer = Tokenizer(backend, settings, templates)
    # The number of ids takes no time, the largest of them some.
    for size in (backend.get_vocab_size, lambda: tokenizer.vocab_size):
        if size() > MOST_IDS:
            raise CheckpointError(
                f"{path} has ids up to {size() - 1}, and they must be below {MOST_IDS}."
            )
    return tokenizer


def _read_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the settings, and the file that holds them."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            return folder / name, read_json(folder / name)
    return folder, {}


def _read_templates(folder: Path, in_settings: Any, place: Path) -> dict[str, str]:
    templates: dict[str, str] = {}
    if isinstance(in_settings, str):
        templates["default"] = in_settings
    elif in_settings is not None:
        where = f"{place}: chat_template"
        for i, entry in enumerate(given(where, in_settings, str | tuple[Mapping[str, Any], ...])):
            name, text = (
                given(f"{where}[{i}]: {key}", entry.get(key), str) for key in ("name", "template")
            )
            # `write` makes a file of each.
            if not is_file_name(name):
                raise CheckpointError(
                    f"{where}[{i}]: name must be the name of a file, got {shown(name)}."
                )
            templates[name] = text
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path, MOST_JSON)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = read_text(folder / "chat_template.jinja", MOST_JSON)
    return templates


def _token_text(value: str | dict) -> str:
    return value if isinstance(value, str) else str(value.get("content", ""))


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            'messages must be a list such as [{"role": "user", "content": "..."}], '
            f"got {type(messages).__name__}."
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(
                f'messages[{index}] must be a dictionary with a "role", got {shown(message)}.'
            )


def _plain_json(variables: dict[str, Any]) -> dict[str, Any]:
    # A template comes from the outside. It is handed nothing that has methods worth calling.
    try:
        return parse_json(json.dumps(variables))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Chat messages must be made of plain JSON values: {error}.") from error


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell the 256 bytes.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def _decoder_of(description: dict[str, Any]):
    """Returns the function from a token, as spelled in the vocabulary, to its bytes."""
    root: dict[str, Any] = description.get("decoder") or {"type": "none"}
    steps: list[dict[str, Any]] = root.get("decoders", [root])
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        alphabet = _byte_alphabet()

        def byte_level(token: str) -> bytes:
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode()

        return byte_level

    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise CheckpointError(
            f"The bytes of single tokens are known for byte-level and SentencePiece tokenizers; "
            f"this one decodes with {sorted(kinds)}. Stop strings and drafts of another vocabulary "
            "cannot be used with it."
        )
    swaps = [
        (step["replacement"], " ")
        if step["type"] == "Metaspace"
        else (step["pattern"].get("String", ""), step["content"])
        for step in steps
        if step["type"] in ("Metaspace", "Replace")
    ]
    spelled_byte = re.compile(r"<0x([0-9A-Fa-f]{2})>") if "ByteFallback" in kinds else None

    def sentence_piece(token: str) -> bytes:
        spelled = spelled_byte.fullmatch(token) if spelled_byte else None
        if spelled:
            return bytes([int(spelled[1], 16)])
        for pattern, content in swaps:
            token = token.replace(pattern, content) if pattern else token
        return token.encode()

    return sentence_piece
