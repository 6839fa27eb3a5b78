"""Names of the tokens that end and begin a document, by which a tokenizer's own are known."""

from __future__ import annotations

END_OF_TEXT = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|eos|>",
    "<EOS>",
    "<｜end▁of▁sentence｜>",
)
"""In the order in which they are looked for."""
BEGIN_OF_TEXT = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<BOS>", "<｜begin▁of▁sentence｜>")
