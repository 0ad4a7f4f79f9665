"""Train DLRM on click logs in the Criteo format under DeepSpeed.

deepspeed scripts/train_dlrm.py --deepspeed_config configs/dlrm/ds_vrsgd.json --run configs/dlrm/flights.yaml \
  --output out/flights
"""

import sys

from ds_vrgd_recipes.clicks.main import main

if __name__ == "__main__":
    sys.exit(main())
