"""`jaxspec train deer`."""

from jaxspec.commands.train import TrainVerb
from jaxspec.training.settings import DeerTrainingSettings

_VERB = TrainVerb(
    "jaxspec.training.deer:DeerTrainer",
    DeerTrainingSettings,
    "Aligns a diffusion model with the causal model that it drafts for (DEER), on answers of "
    "that model: stage 1 first, then stage 2 from its result.",
    own_text=4000,
)
add_arguments, run = _VERB.add_arguments, _VERB.run
settings_from_arguments = _VERB.settings_from_arguments
