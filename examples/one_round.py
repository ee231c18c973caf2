"""The whole algorithm: draft a tree, verify it in one forward pass, let the target draw, accept what it drew, repeat.

Run it with: echo "What is the capital of Japan?" | python examples/one_round.py
"""

from pathlib import Path

import numpy as np
import torch

from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.eager import EagerEngine
from outrider_core.models.moa import device_half, server_half
from outrider_core.models.target import Target, load_target
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling, draw
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.targets.source import TargetSource


def forward(target: Target, text: list[int], tree: TokenTree) -> tuple[np.ndarray, torch.Tensor]:
    """Return logits [text + nodes, vocab]; keys and values [text + nodes, layers, kv_width]."""
    sees = np.tri(len(text) + len(tree), dtype=bool)
    for node, bits in enumerate(tree.ancestor_bits()):  # a node sees the text and its ancestors
        sees[len(text) + node, len(text) :] = [bits >> other & 1 for other in range(len(tree))]
    mask = torch.from_numpy(np.where(sees, 0.0, -1e9)).to(target.model.dtype)[None, None]
    places = torch.tensor([[*range(len(text)), *(len(text) - 1 + depth for depth in tree.depths)]])
    out = target.model(torch.tensor([[*text, *tree.tokens]]), attention_mask=mask, position_ids=places, use_cache=True)
    pairs = [torch.stack([layer.keys[0], layer.values[0]], 1) for layer in out.cache.layers]
    return out.logits[0].numpy(), torch.stack(pairs).permute(3, 0, 1, 2, 4).flatten(2).float()


@torch.inference_mode()
def decode(target: Target, folder: Path, prompt: list[int], sampling: Sampling, count: int) -> tuple[list[int], int]:
    """Return at most `count` tokens after the prompt, with the drafter in `folder`, and the target's forward passes."""
    config, tensors, _ = load_drafter(folder)
    server, engine = server_half(config, tensors), EagerEngine(device_half(config, tensors, target.model))
    ids, shape = tensors["draft_ids"].long().numpy(), RowShape(config.ca_kv_heads, config.head_dim)
    drafter, text, rounds = Drafter(engine, ids, shape, config.sa_kv_heads, config.max_context), prompt, 0
    while len(text) < len(prompt) + count and (text == prompt or text[-1] not in target.eos_ids):
        tree, rounds = drafter.draft(text, sampling, TreeShape()).tree, rounds + 1  # the device: likely continuations
        logits, kv = forward(target, text, tree)  # the cloud: all of them in one pass
        path, node = list[int](), ROOT
        while True:  # the target draws at each node, with noise that depends on seed, position and token alone
            bonus = draw(logits[len(text) + node], sampling, len(text) + len(path))
            if bonus in target.eos_ids or (child := tree.child(node, bonus)) is None:
                break
            path, node = [*path, child], child  # drafted and drawn: accepted
        own = [*range(len(text)), *(len(text) + node for node in path)]  # the target's own states, for the next tree
        drafter.add_rows(np.arange(len(own)), server(kv[own][:, config.target_layers], torch.arange(len(own))).numpy())
        text = [*text, *(tree.tokens[node] for node in path), bonus]
    return text[len(prompt) :][:count], rounds


if __name__ == "__main__":
    target, messages = load_target(TargetSource.resolve()), [{"role": "user", "content": input("question: ")}]
    prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    new, rounds = decode(target, Path("drafters/smollm2-135m-instruct-moa"), prompt, Sampling(), 64)
    print(f"{target.tokenizer.decode(new)}\n{len(new)} tokens in {rounds} forward passes of the target")
