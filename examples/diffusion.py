"""A diffusion model that drafts for itself: the same text in fewer calls of the model."""

import argparse

import jaxspec

PROMPT = "A farmer has 12 apples and buys 7 more. How many apples does he have?\n"


def main(max_new_tokens: int) -> None:
    model = jaxspec.load("demo-block-diffusion")
    config = jaxspec.DenoiseConfig(max_new_tokens=max_new_tokens)
    stepwise = jaxspec.denoise(model, PROMPT, config)
    print(stepwise[0].text)
    print(f"stepwise: {stepwise[0].num_calls} calls")
    for num_drafts in (1, 2, 4):
        drafted = jaxspec.denoise(model, PROMPT, config, jaxspec.SelfSpeculation(num_drafts))
        assert drafted.texts == stepwise.texts
        print(f"{num_drafts} drafts per call: the same text, {drafted[0].num_calls} calls")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    main(**vars(parser.parse_args()))
