"""The draft tree that is fastest for published pass times of a phone, and for a server.

Everything here is computed from those times and an acceptance table; nothing is measured.
`jaxspec tune profile` and `jaxspec tune tree` measure both for your device and your model.
"""

import argparse

import jaxspec
from jaxspec.tuning import load_acceptance, load_profile

DEVICES = ("galaxy-s25-adreno830-vicuna7b-q4", "server-a100-roofline-7b-bf16")


def main(max_nodes: int) -> None:
    acceptance = load_acceptance("eagle1-vicuna7b-tau-4.06-inferred")
    for name in DEVICES:
        found = jaxspec.search_tree(acceptance, load_profile(name), max_nodes=max_nodes)
        best, plain = found.best, found.plain
        print(f"{name}:")
        print(f"  plain decoding: {plain.tokens_per_second:.2f} tokens/s")
        print(f"  the best tree: {best.tokens_per_second:.2f} tokens/s, tau {best.tau:.2f}")
        print(f"  (bonus included) with {len(best.paths)} nodes, as paths of child ranks:")
        print(f"  {[list(path) for path in best.paths]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-nodes", type=int, default=16)
    main(**vars(parser.parse_args()))
