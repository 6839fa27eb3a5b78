"""Train language models whose position ids are chosen freely (RoPE, PoSE, coupled) on OLMo's code base."""

__version__ = "0.2.0"
