"""Pictures of results for notebooks: HTML and SVG as plain strings, without further packages.

Colour AND line show the source of a token, for any colour vision and theme: drafted and accepted
tokens are blue with a solid line, the target's own are orange with a dotted one.
"""

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxspec.core.types import Tree
from jaxspec.models.summary import table_html

if TYPE_CHECKING:
    from jaxspec.decoding.metrics import Metrics
    from jaxspec.decoding.result import Generation, GenerationResult, Rows, TraceStep

MAX_ROWS = 8  # rows of a result, and steps of a trace, that are shown in full
MAX_PROMPT = 240  # characters of a prompt shown before its continuation
MAX_LABEL = 18  # characters of a token shown in a tree

FINISH = {
    "stop_token": "ended by a stop token",
    "stop_string": "ended by a stop string",
    "length": "token budget or context used up",
    "not_finite": "ended by logits that were not finite",
    "grammar": "complete by its grammar",
    "no_token": "ended where settings forbid every token",
    "running": "still running",
}


class Svg(str):
    """Source of a picture; notebooks show it, `Path(...).write_text` keeps it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)


class _Look(NamedTuple):
    """Style of one kind of token. Boxes are opaque, so they suit light and dark pages."""

    fill: str
    line: str
    text: str
    dash: str
    width: float
    tint: str


_ACCEPTED = _Look("#cfe6f8", "#0072b2", "#06283d", "", 2.5, "#0072b245")
_OWN = _Look("#fdebc8", "#d98200", "#3d2600", "2 3", 2, "#e69f0045")
_REJECTED = _Look("#f4f4f4", "#8a8a8a", "#333333", "", 1, "")
_UNUSED = _Look("#e4e4e4", "#b5b5b5", "#8a8a8a", "5 4", 1, "")
_ROOT = _Look("#dcdcdc", "#555555", "#111111", "", 1.5, "")


def generation_html(generation: "Generation") -> str:
    """Returns the prompt's end and the continuation, each token marked by its source."""
    texts = generation.token_texts()
    spans = [
        _token_span(text, drafted, _token_title(generation, index))
        for index, (text, drafted) in enumerate(
            zip(texts, generation.from_draft.tolist(), strict=True)
        )
    ]
    prompt = _escape(prompt_end(generation, MAX_PROMPT))
    num_drafted = int(generation.from_draft.sum())
    metrics = generation.metrics
    facts = (
        f"{_swatch(True)} {num_drafted} drafted and accepted &ensp; "
        f"{_swatch(False)} {len(texts) - num_drafted} the target's own &ensp; "
        f"tau {metrics.mean_acceptance_length:.2f} tokens per target pass, bonus included &ensp; "
        f"{FINISH[generation.finish_reason]}"
    )
    return (
        '<div style="margin:.4em 0 .9em">'
        '<div style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;'
        f'line-height:1.75"><span style="opacity:.6">{prompt}</span>'
        f"{''.join(spans)}</div>"
        f'<div style="font-size:85%;opacity:.85;margin-top:.4em">{facts}</div></div>'
    )


def result_html(result: "GenerationResult") -> str:
    """Returns the first rows of a result, their tokens marked, then the metrics of the call."""
    parts = [
        f'<b style="font-size:85%">{name}</b>{generation_html(row)}'
        for name, row in zip(row_names(result)[:MAX_ROWS], result.rows, strict=False)
    ]
    return f"<div>{''.join(parts)}{_left_out(len(result))}{metrics_html(result.metrics)}</div>"


def row_names(result: "GenerationResult") -> list[str]:
    """Returns a name for each row: its prompt, and its sample where prompts have several."""
    several_samples = any(row.sample_index for row in result.rows)
    return [
        f"prompt {row.prompt_index}" + (f", sample {row.sample_index}" if several_samples else "")
        for row in result.rows
    ]


def _left_out(num_rows: int) -> str:
    left = num_rows - MAX_ROWS
    if left <= 0:
        return ""
    return f"<p>... and {left} more, by their place: <code>result[{MAX_ROWS}]</code></p>"


def rows_html(rows: "Rows") -> str:
    """Returns a table of the first rows of a result: text, or tokens, and why it ended."""
    shown = [
        (str(index), str(row.tokens) if row.text is None else row.text, FINISH[row.finish_reason])
        for index, row in enumerate(rows[:MAX_ROWS])
    ]
    return table_html(("prompt", "text", "end"), shown) + _left_out(len(rows))


def metrics_html(metrics: "Metrics") -> str:
    """Returns a table of the figures that people compare, each with its convention."""
    per_position = ", ".join(f"{share:.0%}" for share in metrics.acceptance_per_position)
    rows = [
        ("mean acceptance length (tau)", f"{metrics.mean_acceptance_length:.2f}",
         "tokens per target pass, bonus included"),
        ("mean accepted tokens", f"{metrics.mean_accepted_tokens:.2f}",
         "draft tokens per target pass, bonus excluded"),
        ("acceptance rate", f"{metrics.acceptance_rate:.0%}", "accepted / drafted along the path"),
        ("acceptance per position", per_position or "-", "of the steps that drafted so far"),
        ("tokens", str(metrics.num_tokens), f"in {metrics.num_verify_steps} target passes"),
    ]  # fmt: skip
    if metrics.seconds:
        note = "prefill included, compilation left out"
        rows.append(("tokens per second", f"{metrics.tokens_per_second:.1f}", note))
    return table_html(("", "", ""), rows)


def trace_table(trace: Iterable["TraceStep"]) -> list[dict]:
    """Returns one dictionary per step, for `pandas.DataFrame` or JSON.

    Keys: `step`, counted from 0; `width`, tokens in the target pass, root included; `seconds`, see
    `TraceStep`; `tree`, per node a dictionary of `token`, `text`, `parent`, `valid`, `accepted`,
    `draft_prob` (of the distribution it was drawn from; `None` if it was chosen deterministically),
    `target_prob` and `warped_target_prob` (the target's, given the node's parent; `None` unless
    `logprobs` and `warped_logprobs` were asked for); `distributions`, the number of those that were
    used; `path`, accepted nodes, root first; `accepted` and `emitted`, the texts of the accepted
    draft tokens and of all tokens the step added, the bonus (or corrected) one included.
    """
    return [_step_row(index, step) for index, step in enumerate(trace)]


def trace_html(trace: Sequence["TraceStep"]) -> str:
    """Returns a table of steps and, below, the trees of the first ones to unfold."""
    rows = [
        (
            str(row["step"]),
            str(row["width"]),
            " ".join(_boxed(node["text"]) for node in row["tree"][1:] if node["valid"]),
            str(row["distributions"]) if row["distributions"] else "chosen",
            " ".join(map(_boxed, row["accepted"])),
            " ".join(map(_boxed, row["emitted"])),
        )
        for row in trace_table(trace)
    ]
    heads = ("step", "width", "offered", "distributions", "accepted", "emitted, bonus included")
    trees = "".join(
        f"<details><summary>tree of step {index}</summary>{step_svg(step)}</details>"
        for index, step in enumerate(trace[:MAX_ROWS])
    )
    return f"<div>{table_html(heads, rows, escaped=True)}{trees}</div>"


def tree_svg(tree: Tree) -> Svg:
    """Draws a draft tree, root on the left; nodes carry their index.

    Example:
        >>> from jaxspec import eagle_tree
        >>> tree_svg(eagle_tree()).count("<rect")
        26
    """
    parents = np.asarray(tree.parents).tolist()
    ranks = np.asarray(tree.ranks).tolist()
    nodes = [
        _Node(str(node), "", f"node {node}, rank {rank} of its parent", _REJECTED)
        for node, rank in enumerate(ranks)
    ]
    nodes[0] = nodes[0]._replace(title="the root: the pending token", look=_ROOT)
    return _draw(parents, nodes, {})


def step_svg(step: "TraceStep") -> Svg:
    """Draws the tree of one step: accepted path, rejected and unused nodes, the target's token.

    Sampled tokens show their draft probability.
    """
    parents, nodes = step.parents.tolist(), []
    kept = _kept_path(step)
    labels = [_label(text) for text in _node_texts(step)]
    for node, (token, label, prob) in enumerate(
        zip(step.tokens.tolist(), labels, _draft_probs(step), strict=True)
    ):
        detail = "" if prob is None else f"{prob:.0%}"
        what = "" if prob is None else f", draft probability {prob:.3g}"
        if node == 0:
            nodes.append(_Node(label, "", f"the pending token, id {token}", _ROOT))
        elif not step.valid[node]:
            nodes.append(_Node("-", "", "not offered", _UNUSED))
        elif node in kept:
            title = f"id {token}{what}: accepted"
            nodes.append(_Node(f"✓ {label}", detail, title, _ACCEPTED))
        else:
            nodes.append(_Node(label, detail, f"id {token}{what}: rejected", _REJECTED))
    if len(step.emitted) == len(step.path):
        token = int(step.emitted[-1])
        label = _label(_spell(step, int(step.tokens[kept[-1]]), token))
        title = f"id {token}: the target's own token, after the last accepted one"
        parents.append(kept[-1])
        nodes.append(_Node(label, "", title, _OWN))
    legend = {
        "✓ accepted": _ACCEPTED,
        "rejected": _REJECTED,
        "not offered": _UNUSED,
        "the target's own": _OWN,
    }
    used = {node.look for node in nodes}
    return _draw(parents, nodes, {name: look for name, look in legend.items() if look in used})


class _Node(NamedTuple):
    label: str
    detail: str
    title: str
    look: _Look


_CHARACTER, _ROW, _BOX, _GAP, _MARGIN = 7.4, 28, 22, 26, 6


def _draw(parents: Sequence[int], nodes: Sequence[_Node], legend: dict[str, _Look]) -> Svg:
    """Draws boxes in columns by depth; each leaf has a row, parents stand in their middle."""
    depths = [0] * len(parents)
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        depths[node] = depths[parent] + 1
        children[parent].append(node)
    rows = _leaf_rows(children)
    sizes = [
        round(_CHARACTER * (len(node.label) + (len(node.detail) + 1 if node.detail else 0))) + 14
        for node in nodes
    ]
    columns = [
        max(size for size, depth in zip(sizes, depths, strict=True) if depth == column)
        for column in range(max(depths) + 1)
    ]
    lefts = [_MARGIN + sum(columns[:column]) + _GAP * column for column in range(len(columns))]
    x = [lefts[depth] for depth in depths]
    y = [_MARGIN + round(row * _ROW) + _BOX // 2 for row in rows]

    edges: dict[_Look, str] = {}
    for node in range(1, len(nodes)):
        parent = parents[node]
        start, middle = x[parent] + sizes[parent], x[node] - _GAP // 2
        look = nodes[node].look
        edge = f"M{start} {y[parent]}H{middle}V{y[node]}H{x[node]}"
        edges[look] = edges.get(look, "") + edge
    # Heavier lines last: edges of siblings share a stretch.
    paths = [
        f'<path d="{edges[look]}" fill="none" {_line(look)}/>'
        for look in sorted(edges, key=lambda look: look.width)
    ]
    boxes = [_Box(*box) for box in zip(nodes, sizes, x, y, strict=True)]
    width = lefts[-1] + columns[-1] + _MARGIN
    height = _MARGIN * 2 + (round(max(rows)) + 1) * _ROW
    if legend:
        left, centre = _MARGIN, height + _BOX // 2 + 4
        for name, look in legend.items():
            size = round(_CHARACTER * len(name)) + 14
            boxes.append(_Box(_Node(name, "", name, look), size, left, centre))
            left += size + 8
        width, height = max(width, left), centre + _BOX // 2 + _MARGIN
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" style="max-width:100%;height:auto" role="img" '
        f'font-family="DejaVu Sans Mono,Menlo,Consolas,monospace" font-size="12" '
        f'xml:space="preserve"><title>A draft tree of {len(parents)} nodes</title>'
        f"{''.join(paths)}{_boxes(boxes)}</svg>"
    )


def _leaf_rows(children: Sequence[Sequence[int]]) -> list[float]:
    """Returns each node's row: leaves in the order of a walk, parents midway between children."""
    rows = [0.0] * len(children)
    num_leaves = 0
    stack = [(0, False)]
    while stack:
        node, below_done = stack.pop()
        if below_done:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
        elif children[node]:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(children[node]))
        else:
            rows[node] = float(num_leaves)
            num_leaves += 1
    return rows


class _Box(NamedTuple):
    """A node and where its box stands."""

    node: _Node
    size: int
    left: int
    centre: int


def _boxes(boxes: Sequence[_Box]) -> str:
    """Draws boxes, then their texts; those of one look share its attributes."""
    shapes: dict[_Look, str] = {}
    texts: dict[_Look, str] = {}
    for node, size, left, centre in boxes:
        look, base = node.look, f'y="{centre + 4}"'
        shapes[look] = shapes.get(look, "") + (
            f'<rect x="{left}" y="{centre - _BOX // 2}" width="{size}" height="{_BOX}" '
            f'rx="4"><title>{_escape(node.title)}</title></rect>'
        )
        texts[look] = texts.get(look, "") + (
            f'<text x="{left + 7}" {base}>{_escape(node.label)}</text>'
        )
        if node.detail:
            texts[look] += (
                f'<text x="{left + size - 7}" {base} text-anchor="end" font-size="10" '
                f'opacity=".7">{_escape(node.detail)}</text>'
            )
    drawn = [f'<g fill="{look.fill}" {_line(look)}>{shapes[look]}</g>' for look in shapes]
    written = [f'<g fill="{look.text}">{texts[look]}</g>' for look in texts]
    return f'{"".join(drawn)}<g pointer-events="none">{"".join(written)}</g>'


def _line(look: _Look) -> str:
    dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    return f'stroke="{look.line}" stroke-width="{look.width}"{dash}'


def _kept_path(step: "TraceStep") -> list[int]:
    """Returns accepted nodes whose tokens were emitted, root first: a stop may cut the path."""
    return step.path[: len(step.emitted) + 1].tolist()


def _draft_probs(step: "TraceStep") -> list[float | None]:
    """Returns the draft's probability of each node's token; `None` for tokens not drawn."""
    if step.draft_logprobs is None:
        return [None] * len(step.tokens)
    probs = np.exp(step.draft_logprobs[step.law_row, step.tokens].astype(np.float64))
    return [None, *probs[1:].tolist()]


def _target_probs(step: "TraceStep", logprobs: np.ndarray | None) -> list[float | None]:
    """Returns the target's probability of each offered node; `None` where it says nothing."""
    if logprobs is None:
        return [None] * len(step.tokens)
    probs = np.exp(logprobs.astype(np.float64)).tolist()
    offered = zip(step.valid.tolist()[1:], probs[1:], strict=True)
    return [None, *(prob if valid else None for valid, prob in offered)]


def _step_row(index: int, step: "TraceStep") -> dict:
    kept = _kept_path(step)
    texts = _node_texts(step)
    columns = {
        "token": step.tokens.tolist(),
        "text": texts,
        "parent": step.parents.tolist(),
        "valid": step.valid.tolist(),
        "accepted": [node in kept for node in range(len(texts))],
        "draft_prob": _draft_probs(step),
        "target_prob": _target_probs(step, step.logprobs),
        "warped_target_prob": _target_probs(step, step.warped_logprobs),
    }
    tree = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    emitted = step.emitted.tolist()
    before = [int(step.tokens[0]), *emitted[:-1]]
    used = np.unique(step.law_row[1:][step.valid[1:]])
    return {
        "step": index,
        "width": step.width,
        "seconds": step.seconds,
        "tree": tree,
        "distributions": 0 if step.draft_logprobs is None else len(used),
        "path": kept,
        "accepted": [texts[node] for node in kept[1:]],
        "emitted": [_spell(step, last, token) for last, token in zip(before, emitted, strict=True)],
    }


def _node_texts(step: "TraceStep") -> list[str]:
    tokens, parents = step.tokens.tolist(), step.parents.tolist()
    return [
        _spell(step, None if parent < 0 else tokens[parent], token)
        for token, parent in zip(tokens, parents, strict=True)
    ]


def _spell(step: "TraceStep", before: int | None, token: int) -> str:
    """Returns the text that a token adds to the one before; some tokenizers drop a first space."""
    if step.tokenizer is None:
        return str(token)
    if before is None:
        return step.tokenizer.decode([token], skip_special_tokens=False)
    first = step.tokenizer.decode([before], skip_special_tokens=False)
    both = step.tokenizer.decode([before, token], skip_special_tokens=False)
    return both[len(first) :] if both.startswith(first) else both


def visible(text: str) -> str:
    """Returns a token on one line: outer spaces as dots, line ends and tabs as arrows."""
    inner = text.strip(" ")
    start = len(text) - len(text.lstrip(" "))
    end = len(text) - start - len(inner)
    shown = "".join(map(_visible_character, inner))
    return "·" * start + shown + "·" * end


def _visible_character(character: str) -> str:
    arrows = {"\n": "↵", "\t": "⇥"}
    if character in arrows:
        return arrows[character]
    return character if character.isprintable() else ascii(character)[1:-1]


def _label(text: str) -> str:
    """Returns a token as a box shows it; an empty one needs something to see."""
    label = visible(text) or "∅"
    return label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


def _running_text(text: str) -> str:
    """Returns a token for running text: real line breaks after their arrows, spaces kept."""
    faint = '<span style="opacity:.5">{}</span>'
    shown = {"\n": faint.format("↵") + "\n", "\t": faint.format("⇥") + "\t"}
    return "".join(
        shown[character] if character in shown else _escape(_visible_character(character))
        for character in text
    )


def _token_style(drafted: bool) -> str:
    look, line = (_ACCEPTED, "solid") if drafted else (_OWN, "dotted")
    return f"background:{look.tint};border-bottom:2px {line} {look.line};margin-right:1px"


def _token_span(text: str, drafted: bool, title: str) -> str:
    return f'<span style="{_token_style(drafted)}" title="{title}">{_running_text(text)}</span>'


def _swatch(drafted: bool) -> str:
    return f'<span style="{_token_style(drafted)}">&emsp;</span>'


def _token_title(generation: "Generation", index: int) -> str:
    source = "drafted, accepted" if generation.from_draft[index] else "the target's own"
    facts = [f"id {generation.tokens[index]}", source]
    if generation.logprobs is not None:
        facts.append(f"log-probability {generation.logprobs[index]:.3f}")
    return _escape("; ".join(facts))


def prompt_end(generation: "Generation", most: int) -> str:
    """Returns the last `most` characters of a prompt, or ids without a tokenizer."""
    ids = generation.prompt_tokens.tolist()
    if generation.tokenizer is None:
        return " ".join(map(str, ids[-most // 8 :])) + " "
    text = generation.tokenizer.decode(ids, skip_special_tokens=False)
    return ("…" if len(text) > most else "") + text[-most:]


def _boxed(text: str) -> str:
    return (
        '<code style="border:1px solid rgba(128,128,128,.5);border-radius:3px;padding:0 .2em">'
        f"{_escape(_label(text))}</code>"
    )
