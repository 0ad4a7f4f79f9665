"""Train a residual network under DeepSpeed.

deepspeed scripts/train_resnet.py --deepspeed_config configs/resnet56/vr_momentum.json --run configs/resnet56/256.yaml \
    --output out/resnet56
"""

import sys

from ds_vrgd_recipes.vision.main import main

if __name__ == "__main__":
    sys.exit(main())
