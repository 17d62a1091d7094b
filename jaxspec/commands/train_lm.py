"""`jaxspec train lm`."""

from jaxspec.commands.train import TrainVerb
from jaxspec.training.settings import LMTrainingSettings

_VERB = TrainVerb(
    "jaxspec.training.lm:LMTrainer",
    LMTrainingSettings,
    "Trains a small Llama-format model, or a draft model that learns a teacher's distributions.",
)
add_arguments, run = _VERB.add_arguments, _VERB.run
settings_from_arguments = _VERB.settings_from_arguments
