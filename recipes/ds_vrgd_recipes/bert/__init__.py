"""BERT pre-training in phases on real text: corpus, vocabulary, examples, model, run."""

from ds_vrgd.extras import need

need(
    "bert",
    "transformers",
    "datasets",
    "pyarrow",
    "tokenizers",
    "numpy",
    "pydantic",
    "yaml",
    "tqdm",
    distribution="ds_vrgd_recipes",
)
