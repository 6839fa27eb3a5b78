"""Decoders that read explicit position ids: OLMo, GPT-NeoX, and Predictive Position Coupling around either."""
