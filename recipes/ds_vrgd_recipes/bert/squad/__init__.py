"""Fine-tuning BERT on questions in the format of SQuAD v1.1, and its official measure."""
