"""`python -m jaxspec.bench`: passes, steps, batches and start-up, all in one run."""

from jaxspec.bench import batch, passes, startup, step

if __name__ == "__main__":
    for part in (passes, step, batch, startup):
        part.main([])
