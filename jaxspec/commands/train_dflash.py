"""`jaxspec train dflash`."""

from jaxspec.commands.train import TrainVerb
from jaxspec.training.settings import DFlashTrainingSettings

_VERB = TrainVerb(
    "jaxspec.training.dflash:DFlashTrainer",
    DFlashTrainingSettings,
    "Trains a head that drafts whole blocks from a target's hidden states (DFlash), on "
    "answers of that target.",
    own_text=4000,
)
add_arguments, run = _VERB.add_arguments, _VERB.run
settings_from_arguments = _VERB.settings_from_arguments
