"""Pre-train BERT in phases under DeepSpeed.

deepspeed scripts/pretrain_bert.py --deepspeed_config configs/ds_vrgd.json --run configs/demo.yaml --output out/demo
"""

import sys

from ds_vrgd_recipes.bert.main import main

if __name__ == "__main__":
    sys.exit(main())
