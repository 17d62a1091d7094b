"""The decode inspector: a traced result as one page on which a person steps through it.

The page holds its script, its style and its data, and loads nothing. Its policy allows no other
script, by checksum, and no request. Texts are in the data only, as JSON in ASCII without `<`, so no
text ends the element that holds it.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.checkpoint.files import CheckpointError, as_path, replacing_files
from jaxspec.decoding.notebook import FINISH, prompt_end, row_names, trace_table
from jaxspec.drafters import loaded_drafter

if TYPE_CHECKING:
    from jaxspec.decoding.result import Generation, GenerationResult
    from jaxspec.drafters import DrafterLike

TREE_VIEW = Path(__file__).resolve().parent / "inspector" / "tree_view.js"
"""Draws a tree; the page of `jaxspec export web` has it too."""
MAX_PROMPT = 2000
"""Characters of a prompt that are shown."""
_DIGITS = 4  # of probabilities and seconds


def save_page(result: "GenerationResult", path: str | Path) -> None:
    """Writes the page of a result, whole or not at all. See `GenerationResult.save_html`."""
    path = as_path("path", path)
    if path.exists() and not path.is_file():
        raise CheckpointError(f"path must be a file to write, but {path} is not a plain file.")
    page = page_html(result)
    with replacing_files(path.parent) as folder:
        (folder / path.name).write_text(page, encoding="utf-8")


def page_html(result: "GenerationResult") -> str:
    """Returns the page of a traced result.

    Raises:
        ValueError: a row has no trace.
    """
    folder = TREE_VIEW.parent
    page, style, script = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("page.html", "style.css", "page.js")
    )
    style = f"\n{style}"
    # Modules of one page cannot import each other, so they become one.
    module = f"\n{TREE_VIEW.read_text(encoding='utf-8')}\n{script}"
    module = re.sub(r"^import .*\n", "", module, flags=re.MULTILINE)
    module = re.sub(r"^export ", "", module, flags=re.MULTILINE)
    data = json.dumps(page_data(result), allow_nan=False, separators=(",", ":"))
    parts = {
        "STYLE_SHA256": _checksum(style),
        "SCRIPT_SHA256": _checksum(module),
        "STYLE": style,
        "SCRIPT": module,
        "DATA": data.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026"),
    }
    return re.sub(r"%(\w+)%", lambda found: parts[found[1]], page)


def page_data(result: "GenerationResult") -> dict[str, Any]:
    """Returns what the page shows, ready for JSON.

    Texts and trees that occur often are written once: steps name them by their place in `texts` and
    `trees`. In a step, `ids`, `texts`, `draft` and `target` have one entry per node, and `unused`
    lists the nodes that were not offered. `draft` and `target` are probabilities, absent where none
    was recorded; `own` is the target's probability of the token that it added itself.

    Raises:
        ValueError: a row has no trace.
    """
    if any(row.trace is None for row in result.rows):
        raise ValueError(
            "save_html shows the steps of a trace, and this result has none: decode with "
            "return_trace=True, and with warped_logprobs=True for the target's probabilities."
        )
    texts: dict[Hashable, int] = {}
    trees: dict[Hashable, int] = {}
    rows = [
        {"name": name, **_row_data(row, texts, trees)}
        for name, row in zip(row_names(result), result.rows, strict=True)
    ]
    metrics, profile = result.metrics, result.drafting
    took = [[step.seconds or 0.0 for step in row.trace or ()] for row in result.rows]
    return {
        "rows": rows,
        "texts": list(texts),
        "trees": list(trees),
        "drafter": next((_name_of(drafter) for drafter in result.drafters), "a drafter"),
        "num_tokens": metrics.num_tokens,
        "seconds": _rounded(metrics.seconds),
        "compile_seconds": _rounded(metrics.compile_seconds),
        "step_seconds": _rounded(max(map(sum, took), default=0.0)),
        "profile": None
        if profile is None
        else {**vars(profile), "speedup": profile.speedup, "drafts": profile.drafts},
    }


def _row_data(
    row: "Generation", texts: dict[Hashable, int], trees: dict[Hashable, int]
) -> dict[str, Any]:
    recorded = row.logprobs if row.warped_logprobs is None else row.warped_logprobs
    steps, at = [], 0
    for step in trace_table(row.trace or ()):
        tree, emitted, kept = step["tree"], step["emitted"], step["path"]
        at += len(emitted)
        columns = {name: [node[name] for node in tree] for name in tree[0]}
        warped = any(prob is not None for prob in columns["warped_target_prob"])
        target = columns["warped_target_prob" if warped else "target_prob"]
        entry = {
            "width": step["width"],
            "tree": trees.setdefault(tuple(columns["parent"]), len(trees)),
            "ids": columns["token"],
            "texts": [texts.setdefault(text, len(texts)) for text in columns["text"]],
            "unused": [node for node, valid in enumerate(columns["valid"]) if not valid],
            "path": kept,
            "count": len(emitted),
            "seconds": _rounded(step["seconds"]),
        }
        for name, probs in (("draft", columns["draft_prob"]), ("target", target)):
            if any(prob is not None for prob in probs):
                entry[name] = [_rounded(prob) for prob in probs]
        if recorded is not None and len(emitted) == len(kept):
            entry["own"] = _rounded(math.exp(recorded[at - 1]))
        steps.append(entry)
    return {
        "prompt": prompt_end(row, MAX_PROMPT),
        "pieces": row.token_texts(),
        "ids": row.tokens.tolist(),
        "finish": FINISH[row.finish_reason],
        "warped": row.warped_logprobs is not None,
        "steps": steps,
    }


def _name_of(drafter: "DrafterLike | None") -> str:
    return type(loaded_drafter(drafter).drafter).__name__


def _rounded(number: float | None) -> float | None:
    if number is None or not math.isfinite(number):
        return None
    return float(f"{number:.{_DIGITS}g}")


def _checksum(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
