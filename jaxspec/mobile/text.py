"""`jaxspec.stream` for exported files: a prompt in, text as it is decoded."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxspec.decoding.generate import StreamStep
from jaxspec.decoding.request import (
    PENALTIES,
    GenerationConfig,
    PromptLike,
    automaton_of,
    check_rules,
    encode_prompt,
    warps_of,
    with_rules_of,
)
from jaxspec.decoding.result import TextStream
from jaxspec.mobile.loops import LoopOf
from jaxspec.mobile.runtime import MobileModel, TextEnd


def stream_text(
    model: MobileModel,
    prompt: PromptLike,
    config: GenerationConfig | None = None,
    loop: LoopOf | None = None,
    seed: int = 0,
) -> Iterator[StreamStep]:
    """Continues ONE prompt and yields the text of every round.

    Args:
        model: an open file.
        prompt: text, ids or chat messages.
        config: how to decode; one row, without log-probabilities.
        loop: see `MobileModel.stream`.
        seed: of sampling; draws differ from those of `jaxspec.generate`.

    Raises:
        ValueError: as `jaxspec.stream`, or for a setting that only JAX has.

    Example:
        >>> import tempfile
        >>> from jaxspec import GenerationConfig, load
        >>> from jaxspec.mobile import ExportConfig, MobileModel, export, stream_text
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     shapes = ExportConfig(capacity=64, prefill=(8,), quantization="float32")
        ...     manifest = export(load("demo-draft"), folder, config=shapes)
        ...     model = MobileModel(f"{folder}/model.tflite")
        >>> config = GenerationConfig(max_new_tokens=8)
        >>> "".join(step.text for step in stream_text(model, "Two and two", config))
        '-third of the number of students'
    """
    config = config or GenerationConfig()
    for name, value, only in (
        ("num_samples", config.num_samples, 1),
        ("logprobs", config.logprobs, False),
        ("warped_logprobs", config.warped_logprobs, False),
        ("choices", config.choices, None),
        ("regex", config.regex, None),
        ("json_schema", config.json_schema, None),
    ):
        if value != only:
            raise ValueError(f"{name}: only {only} is possible on LiteRT, got {value}.")

    def of_one_row(name: str, dtype: type) -> np.ndarray:
        values = np.atleast_1d(np.asarray(getattr(config, name), dtype))
        if len(values) != 1:
            raise ValueError(f"{name}: got {len(values)} values for one prompt; give one.")
        return values

    check_rules(model)
    config = with_rules_of(model, config)
    for name, rule in PENALTIES.items():
        if getattr(config, name) is not None and of_one_row(name, np.float32)[0] != rule.neutral:
            raise ValueError(
                f"{name}: files for LiteRT apply no penalties, got {getattr(config, name)}; pass "
                f"GenerationConfig({name}={rule.neutral:g}) to decode without."
            )
    ids = encode_prompt(model, prompt)
    warp: Any = jax.tree.map(lambda values: values[0], warps_of(model, config, of_one_row, 1))
    stops = model.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids
    budget = int(of_one_row("max_new_tokens", np.int32)[0])
    if budget == 0:
        return
    room = min(budget, model.manifest.capacity - len(ids))
    end = TextEnd(room, stops, automaton_of(model, config))
    shown = TextStream(model.tokenizer, config.stop_strings)
    for emitted in model.stream(ids, loop, warp, seed):
        kept, reason = end.cut(emitted.tokens)
        tokens = np.asarray(kept, np.int32)
        from_draft = np.arange(len(kept)) < emitted.num_drafted
        yield StreamStep(tokens, from_draft, shown.push(tokens, reason), reason, None)
        if reason is not None:
            return
