"""A NeMo AutoModel recipe that trains with an optimizer of ds_vrgd under FSDP2.

torchrun --nproc-per-node 8 examples/automodel_recipe.py --config finetune.yaml

with this in AutoModel's YAML:

    optimizer:
      _target_: ds_vrgd.VRLAMB
      lr: 4.0e-3
      weight_decay: 0.01
"""

from __future__ import annotations

from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from torch.distributed.fsdp import FSDPModule

import ds_vrgd


class VRRecipe(TrainFinetuneRecipeForNextTokenPrediction):
    """AutoModel's recipe; its optimizers see the chunks of FSDP2."""

    def setup(self) -> None:
        """Set up as AutoModel does, then attach each optimizer to the part of the model that it updates."""
        super().setup()
        for part, optimizer in zip(self.model_parts, self.optimizer, strict=True):
            if isinstance(part, FSDPModule):
                ds_vrgd.attach(part, optimizer)


if __name__ == "__main__":
    recipe = VRRecipe(parse_args_and_load_config(None))
    recipe.setup()
    recipe.run_train_validation_loop()
