"""BERT pre-training in phases on real text: corpus, vocabulary, examples, model, run."""
