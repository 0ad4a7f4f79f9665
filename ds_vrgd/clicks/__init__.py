"""DLRM on click logs in the Criteo format: reading, vocabulary, model, training."""
