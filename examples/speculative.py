"""The same text with and without drafts, in fewer passes of the target."""

import argparse

import jaxspec

PROMPT = "A farmer has 12 apples and buys 7 more. How many apples does he have?\n"


def main(max_new_tokens: int) -> None:
    model = jaxspec.load("demo")
    config = jaxspec.GenerationConfig(max_new_tokens=max_new_tokens)
    head = jaxspec.load_eagle("demo-eagle", model)
    drafters = {
        "prompt lookup": jaxspec.PromptLookup(),
        "a draft model": jaxspec.DraftModel.of(jaxspec.load("demo-draft"), 4),
        "an EAGLE head": jaxspec.Eagle.of(head, ((0,), (1,), (0, 0), (0, 0, 0))),
    }

    plain = jaxspec.generate(model, PROMPT, config)
    print(plain[0].text)
    for name, drafter in drafters.items():
        fast = jaxspec.generate(model, PROMPT, config, drafter)
        assert fast[0].tokens.tolist() == plain[0].tokens.tolist()
        tau = fast.metrics.mean_acceptance_length
        print(f"{name}: the same text, {tau:.2f} tokens per pass, bonus token included")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    main(**vars(parser.parse_args()))
