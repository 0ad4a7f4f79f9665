"""Fine-tune BERT on a task of GLUE.

python scripts/finetune_glue.py --model out/demo/model --task mrpc --output out/mrpc
"""

import sys

from ds_vrgd_recipes.bert.glue import main

if __name__ == "__main__":
    sys.exit(main())
