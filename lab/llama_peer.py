"""llama.cpp as a process that answers prompts: `lab.peers` runs it with any Python that has llama-cpp-python.

    PYTHON lab/llama_peer.py model.gguf THREADS CONTEXT LOOKUP < requests

Needs nothing of this project. A first line of output reports that the model is loaded or why not; then each line of
input {"prompt": [ids], "new": n} is answered by one of output {"tokens": [ids], "seconds": s}. LOOKUP: tokens that it
drafts by prompt lookup; 0: it decodes plainly.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from typing import Any


def main() -> int:
    path, threads, context, lookup = sys.argv[1], *map(int, sys.argv[2:])
    try:
        llama: Any = importlib.import_module("llama_cpp")
        drafts: Any = importlib.import_module("llama_cpp.llama_speculative")
        drafter = drafts.LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
        model = llama.Llama(
            path,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=drafter,
            logits_all=drafter is not None,  # keeps the logits of all tokens, for which there is only room with this
            verbose=False,
        )
    except Exception as error:
        print(json.dumps({"error": " ".join(str(error).split())}), flush=True)
        return 1
    print(json.dumps({"version": llama.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        tokens, seconds = answer(model, request["prompt"], request["new"])
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)
    return 0


def answer(model: Any, prompt: list[int], new: int) -> tuple[list[int], float]:
    """Return exactly `new` greedy tokens after `prompt`, and their seconds without the prompt's."""
    model.reset()
    if prompt[:-1]:
        model.eval(prompt[:-1])
    begun = time.perf_counter()
    # it finds the prompt in its cache and runs the last token only
    tokens = [int(token) for token in itertools.islice(model.generate(prompt, temp=0.0, repeat_penalty=1.0), new)]
    return tokens, time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
