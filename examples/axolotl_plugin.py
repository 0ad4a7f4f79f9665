"""An Axolotl plugin that trains with VRLAMB.

In Axolotl's YAML, with this file on PYTHONPATH:

    plugins: [axolotl_plugin.VRPlugin]
    learning_rate: 4e-3
    gradient_accumulation_steps: 8        # k = ranks x accumulation, at least 2

Under DeepSpeed no plugin is needed: name the optimizer in the JSON of ``deepspeed:``.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

import ds_vrgd


class VRPlugin(BasePlugin):
    """Gives the trainer VRLAMB. Axolotl 0.19 calls no ``create_optimizer`` of a plugin."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Set the optimizer of a trainer that has made none yet."""
        trainer.optimizer_cls_and_kwargs = (ds_vrgd.VRLAMB, {"lr": cfg.learning_rate, "gamma": 0.1})
