"""Make a train.json and a dev.json in the format of SQuAD v1.1 over Wikipedia passages that install by package name.

python scripts/make_cloze_squad.py --output data/cloze
"""

import sys

from ds_vrgd_recipes.bert.squad.cloze import main

if __name__ == "__main__":
    sys.exit(main())
