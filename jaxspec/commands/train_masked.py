"""`jaxspec train masked`."""

from jaxspec.commands.train import TrainVerb
from jaxspec.training.settings import MaskedTrainingSettings

_VERB = TrainVerb(
    "jaxspec.training.masked:MaskedTrainer",
    MaskedTrainingSettings,
    "Trains a diffusion language model, from random weights or from those of a causal model.",
)
add_arguments, run = _VERB.add_arguments, _VERB.run
settings_from_arguments = _VERB.settings_from_arguments
