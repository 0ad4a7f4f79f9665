"""VRLAMB by name in ms-swift.

swift sft --external_plugins examples/swift_plugin.py --optimizer vrlamb --gradient_accumulation_steps 8 ...
"""

from __future__ import annotations

from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map

import ds_vrgd


class VRLAMBCallback(OptimizerCallback):
    """Makes VRLAMB as the Trainer makes any optimizer class, with its param groups."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the optimizer for the trainer's model."""
        self.trainer.optimizer_cls_and_kwargs = (ds_vrgd.VRLAMB, {"lr": self.args.learning_rate, "gamma": 0.1})
        return super().create_optimizer(model)


optimizers_map["vrlamb"] = VRLAMBCallback
