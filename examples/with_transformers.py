"""Run `python -m examples.with_transformers` from the repository's root: OmniKV on a model that
transformers has loaded, beside that model's own attention. Slow: it is for trying, not for use.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import OmniKV
from engine.integrations.transformers import OmniKVCache

FOLDER = "weights/pocket"
DOCUMENT = Path("weights/pocket/welcome.txt").read_text(encoding="utf-8")
QUESTION = {"role": "user", "content": "What is the pass key of Alice?"}


def main() -> None:
    """Print both answers, and what the filter layers chose for the last token."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(FOLDER)
    talk = [{"role": "system", "content": DOCUMENT}, QUESTION]
    ids = words.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt")
    for attention in ("sdpa", "omnikv"):
        model.set_attn_implementation(attention)
        cache = None
        if attention == "omnikv":
            method = OmniKV(filter_layers=(2,), tokens=64, tail=128, dense_below=0)
            cache = OmniKVCache(model, method, max_context=2048)
        found = model.generate(**ids, past_key_values=cache, max_new_tokens=16, do_sample=False)
        answer = words.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{attention}: {answer.strip()}")
    for layer, positions in cache.selections.items():
        print(f"layer {layer} chose {len(positions)} of {cache.get_seq_length():,} tokens")


if __name__ == "__main__":
    main()
