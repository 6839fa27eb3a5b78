"""Measure what a far context gives a language model, and how few of its tokens give it."""
