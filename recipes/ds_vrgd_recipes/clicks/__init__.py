"""DLRM on click logs in the Criteo format: reading, vocabulary, model, training."""

from ds_vrgd.extras import need

need("clicks", "pyarrow", "numpy", "pydantic", "yaml", "tqdm", distribution="ds_vrgd_recipes")
