"""`jaxspec train eagle`."""

from jaxspec.commands.train import TrainVerb
from jaxspec.training.settings import EagleTrainingSettings

_VERB = TrainVerb(
    "jaxspec.training.eagle:EagleTrainer",
    EagleTrainingSettings,
    "Trains a head that drafts from a target's hidden states, on text that the target "
    "writes itself.",
    own_text=2000,
)
add_arguments, run = _VERB.add_arguments, _VERB.run
settings_from_arguments = _VERB.settings_from_arguments
