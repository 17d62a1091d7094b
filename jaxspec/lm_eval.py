"""Models for lm-evaluation-harness, whose tasks then decode with drafters.

Needs the extra `lm-eval`. Likelihoods are those of `jaxspec.score`, one text at a time.
`jaxspec.batch.decode` decodes answers, in slots that are refilled.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.batch.job import decode
from jaxspec.batch.settings import JobSettings
from jaxspec.core.checks import Natural, checked
from jaxspec.decoding.generate import likelihoods
from jaxspec.decoding.request import check_causal
from jaxspec.drafters import DrafterLike, loaded_drafter
from jaxspec.extras import needs_extra
from jaxspec.progress import progress_bar

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

__all__ = ["as_lm"]

_FILTERS = ("top_k", "top_p", "min_p")


def as_lm(
    model: "Model",
    drafter: DrafterLike | None = None,
    job: JobSettings | None = None,
    *,
    seed: int = 0,
    progress: bool = True,
) -> Any:
    """Returns a model as one of the harness: an instance of a subclass of its `LM`.

    Texts that leave no room are cut at their beginning, as the harness's own models do; answers as
    long as the model's context, which leave room for no text, are refused. Greedy answers in
    float32 are those of plain decoding, with every drafter.

    Args:
        model: a causal model with a tokenizer, from `load`.
        drafter: see `generate`; it changes how long `generate_until` takes, and nothing else.
        job: how answers are decoded.
        seed: of tasks that sample.
        progress: draw a bar on terminals; elsewhere say how far it is once a minute.

    Raises:
        MissingExtra: `lm_eval` is not installed.
        ValueError: the model has no tokenizer, or is a diffusion language model, or an argument has
            a wrong type.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> def evaluate():
        ...     import lm_eval  # of the extra `lm-eval`
        ...     lm = as_lm(model, jaxspec.PromptLookup())
        ...     return lm_eval.simple_evaluate(lm, tasks=["gsm8k"], limit=20)
    """
    check_causal(model)
    loaded_drafter(drafter)
    job = checked("job", job, JobSettings | None)
    seed, progress = checked("seed", seed, Natural), checked("progress", progress, bool)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(f"model: {model.name} has no tokenizer, which the harness needs.")
    with needs_extra("jaxspec.lm_eval", "lm-eval"):
        base: Any = importlib.import_module("lm_eval.api.model").TemplateLM
        rolling: Any = importlib.import_module("lm_eval.utils")
        normalized: Any = importlib.import_module("lm_eval.models.utils").normalize_gen_kwargs

    class SpeculativeLM(base):
        @property
        def eot_token_id(self) -> int:
            ids = (tokenizer.eos_id, *model.stop_token_ids, 0)
            return next(token for token in ids if token is not None)

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_id is None else tokenizer.bos_id

        @property
        def tokenizer_name(self) -> str:
            return model.name.replace("/", "__")

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            ids = tokenizer.encode(string, add_special_tokens is not False)
            # A rendered chat has its own first token.
            twice = add_special_tokens is None and ids[:2] == [tokenizer.bos_id] * 2
            return ids[1:] if twice else ids

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            name = chat_template if isinstance(chat_template, str) else "default"
            return tokenizer.templates.get(name) if chat_template else None

        def apply_chat_template(
            self, chat_history: Sequence[Any], add_generation_prompt: bool = True
        ) -> str:
            return tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any
        ) -> list[tuple[float, bool]]:
            found = []
            with progress_bar(len(requests), progress and not disable_tqdm) as advance:
                for texts, context, continuation in requests:
                    advance("reading texts")
                    found.append(_likelihood(model, context, continuation))
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, found[-1])
            return found

        def loglikelihood_rolling(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[float]:
            # A window and the token before it are read at once.
            most = model.max_positions - 1
            found = []
            for request in requests:
                ids = self.tok_encode(request.args[0], add_special_tokens=False)
                windows = rolling.get_rolling_token_windows(ids, self.prefix_token_id, most, 1)
                parts = [(None, *rolling.make_disjoint_window(window)) for window in windows]
                likelihoods = self._loglikelihood_tokens(parts, disable_tqdm)
                found.append(sum(likelihood for likelihood, _ in likelihoods))
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
            return found

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            # Requests of a task have the same settings, apart from few.
            groups: dict[str, list[int]] = {}
            for place, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(place)
            texts = [""] * len(requests)
            for places in groups.values():
                settings = _settings_of(normalized(requests[places[0]].args[1]))
                room = _room(model, settings["max_new_tokens"])
                prompts = [self.tok_encode(requests[place].args[0])[-room:] for place in places]
                prompts = [ids or [self.prefix_token_id] for ids in prompts]
                shown = progress and not disable_tqdm
                records = decode(
                    model, prompts, None, drafter, seed, job, progress=shown, **settings
                )
                for place, record in zip(places, records, strict=True):
                    if "error" in record:
                        raise ValueError(f"request {place}: {record['error']}")
                    texts[place] = record["text"]
                    args = requests[place].args
                    self.cache_hook.add_partial("generate_until", args, texts[place])
            return texts

    return SpeculativeLM()


def _likelihood(
    model: "Model", context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """Returns the log-likelihood of a continuation, and whether it is the greedy one."""
    ids = [*context, *continuation][-model.max_positions :]
    count = min(len(continuation), len(ids) - 1)
    logprobs, likeliest = (each[len(ids) - 1 - count :] for each in likelihoods(model, ids))
    is_greedy = bool(np.array_equal(likeliest, ids[len(ids) - count :]))
    return float(np.sum(logprobs, dtype=np.float64)), is_greedy


def _room(model: "Model", max_new_tokens: int) -> int:
    """Returns the most tokens of a prompt that leave room for the answer.

    Raises:
        ValueError: the answer leaves no room for a prompt.
    """
    if max_new_tokens >= model.max_positions:
        raise ValueError(
            f"max_gen_toks={max_new_tokens} leaves no room for a prompt in the "
            f"{model.max_positions} positions of {model.name}: give a smaller one, such as "
            f'gen_kwargs="max_gen_toks={model.max_positions // 2}", or a larger max_positions to '
            "`load`."
        )
    return model.max_positions - max_new_tokens


def _settings_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of `GenerationConfig` for the settings of a request, as normalized."""
    stop = tuple(filter(None, asked["until"]))
    settings: dict[str, Any] = {"max_new_tokens": asked["max_gen_toks"], "stop": stop}
    if asked.get("do_sample"):
        settings["temperature"] = asked.get("temperature", 1.0)
        settings |= {name: asked[name] for name in _FILTERS if name in asked}
    return settings
