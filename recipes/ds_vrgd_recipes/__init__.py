"""The programs that train with ds_vrgd: BERT, DLRM, residual networks; and what they share."""

__version__ = "0.1.0"
