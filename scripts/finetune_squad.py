r"""Fine-tune BERT on questions in the format of SQuAD v1.1, and score its answers.

python scripts/finetune_squad.py --model out/demo --output out/squad \
  --train-file train-v1.1.json --predict-file dev-v1.1.json
"""

import sys

from ds_vrgd_recipes.bert.squad.main import main

if __name__ == "__main__":
    sys.exit(main())
