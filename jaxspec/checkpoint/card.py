"""The model card that a saved model begins with: its README.md, for its author to complete."""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.extras import DISTRIBUTION, installed_version
from jaxspec.models.summary import weight_facts

if TYPE_CHECKING:
    from jaxspec.checkpoint.hub import Model

CARD = "README.md"

_CARD = """---
library_name: jaxspec
tags: [jaxspec]
---

# {name}

A {kind} of {layers} layers and {weights} weights, with a vocabulary of {vocab} ids and texts of up
to {positions} tokens. Its files were written by `{distribution}` {version}.

```python
import jaxspec  # pip install {distribution}

model = jaxspec.load("PATH")  # of this folder, or its owner/name on the Hugging Face Hub
print(jaxspec.{verb}(model, {prompt})[0].{shown})
```

- Base model: loaded as `{name}`. What was changed, and on which data: for the author to say.
- Licence: for the author to say. The base model's and its data's may bind it.
"""


def model_card(model: "Model") -> str:
    """Returns what a model is, how to load it, and what its author still has to say.

    A path that it was loaded from is cut to its last part.
    """
    place = Path(model.name).expanduser()
    with_text = model.tokenizer is not None
    return _CARD.format(
        name=place.resolve().name if place.is_absolute() or place.exists() else model.name,
        kind="diffusion language model" if model.is_diffusion else "causal language model",
        layers=model.config.num_layers,
        weights=weight_facts(model.params)["weights"],
        vocab=model.vocab_size,
        positions=model.max_positions,
        distribution=DISTRIBUTION,
        version=installed_version(),
        verb="denoise" if model.is_diffusion else "generate",
        prompt='"Once upon a time"' if with_text else "[1, 2, 3]",
        shown="text" if with_text else "tokens",
    )
