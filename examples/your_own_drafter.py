"""A drafting method in a few lines, checked by `check_drafter`: it repeats the last token."""

import argparse
import dataclasses

import jax.numpy as jnp

import jaxspec
from jaxspec.core.proposal import chain_proposal


@dataclasses.dataclass(frozen=True)
class Echo:
    """Drafts the last token of the text again and again."""

    num_speculative_tokens: int = 2
    taps = ()

    @property
    def tree_shape(self):
        return self.num_speculative_tokens + 1, self.num_speculative_tokens

    @property
    def widths(self):
        return (self.num_speculative_tokens + 1,)

    def init(self, params, prompt, context):
        return ()

    def propose(self, params, key, state, context):
        last = context.tokens[context.length - 1]
        tokens = jnp.full(self.num_speculative_tokens + 1, last)
        return chain_proposal(tokens, jnp.ones(len(tokens), bool)), state


def main(max_new_tokens: int, num_samples: int) -> None:
    report = jaxspec.check_drafter(Echo(), num_samples=num_samples)
    print(report)
    report.raise_if_broken()
    model, config = jaxspec.load("demo"), jaxspec.GenerationConfig(max_new_tokens=max_new_tokens)
    result = jaxspec.generate(model, "def add(a, b):\n", config, Echo())
    print(result[0].text)
    print(f"{result.metrics.mean_acceptance_length:.2f} tokens per pass, bonus token included")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-samples", type=int, default=1024, help="of the check")
    main(**vars(parser.parse_args()))
