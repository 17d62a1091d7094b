"""A file of prompts, decoded in slots that are refilled as rows finish.

`jaxspec batch IN.jsonl OUT.jsonl --model MODEL` does the same, and resumes after an interruption.
"""

import argparse
import json
import tempfile
from pathlib import Path

import jaxspec
from jaxspec import batch

QUESTIONS = [f"A farmer has {n} apples and buys 7. How many has he?\n" for n in range(3, 9)]


def main(max_new_tokens: int, rows: int) -> None:
    model = jaxspec.load("demo")
    config = jaxspec.GenerationConfig(max_new_tokens=max_new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "questions.jsonl")
        lines = [json.dumps({"id": f"q{i}", "prompt": q}) for i, q in enumerate(QUESTIONS[:rows])]
        path.write_text("\n".join(lines))
        output = batch.Collector()
        report = batch.run(
            model, batch.read_rows(path), output, config, drafter=jaxspec.PromptLookup()
        )
    for record in sorted(output.records, key=lambda record: record["line"]):
        print(f"{record['id']}: {record['text']!r}")
    print(f"{len(output.records)} rows, {report.tokens_per_second:.0f} tokens/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=len(QUESTIONS))
    main(**vars(parser.parse_args()))
