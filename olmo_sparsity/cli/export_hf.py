"""Write a checkpoint as a directory that transformers loads without remote code, tokenizer included.

example:
  olmo-sparsity export_hf runs/demo --out runs/demo/hf

then, anywhere:
  from transformers import AutoModelForCausalLM, AutoTokenizer
  model, tokenizer = AutoModelForCausalLM.from_pretrained("runs/demo/hf"), AutoTokenizer.from_pretrained("runs/demo/hf")

or measure it as any other model: olmo-sparsity measure runs/demo/hf --corpus runs/demo/data --out ...

The class is the one that computes exactly the same, Llama, Olmo, Olmo2, GPTNeoX, or SmolLM3 for layers of NoPE; another
shape is refused by name. Logits of both are compared before anything is written. At position ids that jump, give
transformers an attention mask of ones: without one it takes a jump for the beginning of another document.
`hf upload USER/MODEL DIR` puts the folder on the Hugging Face Hub.
"""

from __future__ import annotations

from olmo_sparsity.cli import show_log
from olmo_sparsity.util.arguments import Parser, out_folder


def main() -> None:
    """Parse arguments and export."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="checkpoint folder, or a run folder (then its last checkpoint)")
    add("--out", type=out_folder, required=True, metavar="DIR", help="folder to write to")
    add(
        "--bf16", action="store_true", help="round the weights to bf16: half the size, slightly other numbers"
    )
    arguments = parser.parse_args()
    from olmo_sparsity.export import export_checkpoint  # here, so that --help needs no torch

    show_log()
    done = export_checkpoint(arguments.checkpoint, arguments.out, bf16=arguments.bf16)
    size = f"{done['parameters']:,} parameters, {done['max_positions']:,} positions"
    print(f"{arguments.out}: {done['architecture']}, {size}")
