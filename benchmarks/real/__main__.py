"""A pretrained model of 135 M parameters, and the data that people have.

    python -m benchmarks.real --json -
    python -m benchmarks.real --only 5
    python -m benchmarks.real --only 1a --quick

1  fine-tuning by the defaults: 1a all weights and 1b adapters, held-out loss beside AdamW in one
   process (five to nine runs of 60 epochs of 4,096 tokens there, in the format of the daemons: an
   hour on 2 cores with units for bf16, four without them; each is kept when it is over, and a
   benchmark that was stopped goes on with the others; --quick: three runs of 12 epochs of 2,048);
   1c a rate that is far too large
2  adapters: tokens a second beside PEFT in one process, in fp32 and in bf16
3  generate: tokens a second beside transformers, several texts, a stage that dies
4  serve: the client of the OpenAI API beside transformers, 32 clients at once
5  export: files equal to those given, logits, adapters, merged weights, GGUF
6  conversations: losses and masks, a format that the model is taught
7  trials that were reported elsewhere: before, now, and the tests that show it
8  limits: a control group, a quota, an affinity; nine bridges

The model is SmolLM2-135M-Instruct (`benchmarks.real.pretrained`). Where it cannot be had, the rows
say so and do not hold.
"""

import sys

from benchmarks.shared.parts import run_asked

PARTS = {
    "1a": ("finetuned:full",),
    "1b": ("finetuned:adapters",),
    "1c": ("finetuned:too_large",),
    "2": ("speed",),
    "3": ("generated",),
    "4": ("served",),
    "5": ("exported",),
    "6": ("chat",),
    "7": ("trials",),
    "8": ("limits",),
}
"""Number to modules of this package, or functions in them."""


def main() -> int:
    return run_asked(__doc__, "benchmarks.real", PARTS, quick=("1a", "1b"))


if __name__ == "__main__":
    sys.exit(main())
