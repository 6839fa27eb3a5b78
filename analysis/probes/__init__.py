"""Probes of a model on any texts: loss by position, needles, perplexity on key tokens."""
