"""Check that LiteRT-LM decodes a `.litertlm`, with the same texts with its drafter and without.

It runs on the runtime's CPU backend. The runtime may end its process, so it runs in a child.
"""

import importlib
import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.checkpoint.tokenizer import REPLACEMENT
from jaxspec.extras import check_version, needs_extra
from jaxspec.mobile.child import ask_child
from jaxspec.mobile.extra import OLDEST_LM

PROMPTS = ("Question: What is 3 + 4?\n", "def add(a, b):\n", "Once upon a time", "1, 2, 3, 4,")

_SUCCESS = re.compile(r"Success rate: ([0-9.eE+-]+)")


class LmRun(NamedTuple):
    """Texts decoded in one way.

    Attributes:
        texts: one behind each prompt.
        ended: True for a text that a stop token ended, not its budget or the file's capacity.
        tokens_per_second: of decoding, by the runtime's own count, prompts left out.
        success_rate: share of drafted tokens that were accepted, bonus EXCLUDED; `None` without
            drafts.
    """

    texts: tuple[str, ...]
    ended: tuple[bool, ...]
    tokens_per_second: float
    success_rate: float | None


class LmCheck(NamedTuple):
    """Runs of a file by LiteRT-LM: plain, and with its drafter if it has one."""

    plain: LmRun
    speculative: LmRun | None

    @property
    def problems(self) -> tuple[str, ...]:
        """Texts that the drafter changed; there should be none.

        The runtime checks its budget once a round, so drafts may make a text a bit longer.
        """
        if self.speculative is None:
            return ()
        texts = zip(self.plain.texts, self.plain.ended, self.speculative.texts, strict=True)
        return tuple(
            _difference(prompt, ours, theirs)
            for prompt, (ours, ended, theirs) in enumerate(texts)
            if not (ours == theirs if ended else theirs.startswith(ours.rstrip(REPLACEMENT)))
        )

    def __str__(self) -> str:
        lines = [f"LiteRT-LM: plain {self.plain.tokens_per_second:.1f} tokens/s"]
        if self.speculative is not None:
            run, count = self.speculative, len(self.plain.texts)
            lines.append(
                f"with drafts {run.tokens_per_second:.1f} tokens/s, "
                f"{run.success_rate or 0.0:.0%} of drafted tokens accepted (bonus excluded), "
                f"{count - len(self.problems)} of {count} texts equal"
            )
        return "\n".join([*lines, *self.problems])


def _difference(prompt: int, ours: str, theirs: str) -> str:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    at = len(list(pairs))
    return (
        f"prompt {prompt}: from character {at} on {theirs[at : at + 30]!r} with drafts, "
        f"{ours[at : at + 30]!r} without"
    )


def check_litertlm(
    path: str | Path,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = 64,
    threads: int = 1,
    timeout: float = 900.0,
) -> LmCheck:
    """Decodes with a file by LiteRT-LM's CPU backend, greedily.

    Args:
        path: the `.litertlm`.
        prompts: texts, continued as they are, without a chat's template.
        max_new_tokens: of each text; with drafts the runtime may emit a few more.
        threads: of the backend.
        timeout: seconds for each of the two ways to decode.

    Raises:
        ValueError: the extra `mobile-lm` is not installed or too old, or the runtime refused the
            file or ended its process, with its own messages.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist, or is no file: give the .litertlm itself.")
    check_version("litert-lm-api", OLDEST_LM, "Running LiteRT-LM", "mobile-lm")
    with needs_extra("Running LiteRT-LM", "mobile-lm"):
        importlib.import_module("litert_lm")
    task: dict[str, Any] = {
        "path": str(path),
        "prompts": list(prompts),
        "max_new_tokens": max_new_tokens,
        "threads": threads,
    }
    plain = _run({**task, "speculative": False}, timeout)
    has_drafter = b"tf_lite_mtp_drafter" in path.open("rb").read(1 << 16)
    return LmCheck(plain, _run({**task, "speculative": True}, timeout) if has_drafter else None)


def _run(task: dict[str, Any], timeout: float) -> LmRun:
    work, advice = f"LiteRT-LM's check of {task['path']}", "it more time, or fewer prompts"
    answer, log = ask_child("jaxspec.mobile.litertlm_check", task, timeout, work, advice)
    # The runtime prints it only in its log, when the engine is closed.
    found = _SUCCESS.search(log)
    rate = float(found[1]) if found else None
    return LmRun(tuple(answer["texts"]), tuple(answer["ended"]), answer["tokens_per_second"], rate)


def _child() -> None:
    """Runs in the child: reads a task from standard input, writes the answer to a file."""
    litert_lm: Any = importlib.import_module("litert_lm")
    task, result = json.load(sys.stdin), Path(sys.argv[1])
    litert_lm.set_min_log_severity(litert_lm.LogSeverity.INFO)
    engine = litert_lm.Engine(
        task["path"],
        backend=litert_lm.Backend.CPU(thread_count=task["threads"]),
        cache_dir=str(result.parent),
        enable_benchmark=True,
        enable_speculative_decoding=task["speculative"],
    )
    with litert_lm.ModelInfo(task["path"]) as info:
        room = info.max_context_tokens
    budget = task["max_new_tokens"]
    texts, ended, tokens, seconds = [], [], 0, 0.0
    for prompt in task["prompts"]:
        with engine.create_session(max_output_tokens=budget) as session:
            session.run_prefill([prompt])
            texts.append("".join(session.run_decode().texts))
            told = session.get_benchmark_info()
        count = told.last_decode_token_count
        ended.append(count < min(budget, room - told.last_prefill_token_count))
        tokens += count
        seconds += count / told.last_decode_tokens_per_second if count else 0.0
    engine.close()
    speed = tokens / seconds if seconds else 0.0
    answer = {"texts": texts, "ended": ended, "tokens_per_second": speed}
    result.write_text(json.dumps(answer))


if __name__ == "__main__":
    _child()
