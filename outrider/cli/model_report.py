"""`outrider doctor --model`: describe a model's files, which engine serves them, and what they lack.

It loads no weights.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from outrider.cli.doctor import Finding, good
from outrider_core.models.folders import drafters_folder
from outrider_core.targets.bundle import TargetBundleError, open_target_bundle
from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.source import TargetError, TargetSource, chat_tokenizer_in


@dataclass(frozen=True)
class ModelFacts:
    """formats: numbers of weights by storage format. ends: ids by text, of the tokens that end answers.

    fault: why a conversation cannot be written, "" if one can.
    """

    formats: Counter[str]
    tokenizer: str
    fault: str
    ends: dict[str, int]
    torch: bool


def look_at_model(name: str) -> list[Finding]:
    """Return findings about a target, named as in other commands."""
    try:
        source = TargetSource.resolve(name)
        if source.prepared:
            return _look_at_bundle(source)
        config, facts = _gguf_facts(source) if source.path.is_file() else _folder_facts(source)
    except UnsupportedTarget as error:
        advice = "take another model, or another copy of it: docs/models.md lists what is supported"
        return [Finding("model", "bad", f"{name}: {error}", advice)]
    except (TargetError, TargetBundleError, BrokenTarget) as error:
        return [Finding("model", "bad", str(error), "download the model again, or name another one")]
    return [*_looks(source, config, facts)]


def _look_at_bundle(source: TargetSource) -> list[Finding]:
    bundle = open_target_bundle(source.path)
    text = (
        f"target bundle of {bundle.name}, {bundle.config.family}, {bundle.bits} bits, {bundle.max_positions:,} tokens"
    )
    return [good("model", f"{text} of context; the ONNX engine serves it", bits=bundle.bits)]


def _looks(source: TargetSource, config: TargetConfig, facts: ModelFacts) -> Iterator[Finding]:
    count = sum(math.prod(shape) for shape in config.tensors().values())
    stored = ", ".join(
        f"{100 * share / facts.formats.total():.0f} % {kind}" for kind, share in facts.formats.most_common(3)
    )
    yield good(
        "model",
        f"{config.family}, {count / 1e6:,.0f} million weights ({stored}), {config.max_position_embeddings:,} tokens of "
        "context",
        family=config.family,
        weights=count,
        context=config.max_position_embeddings,
        formats=dict(facts.formats),
    )
    ends = ", ".join(facts.ends) or "nothing"
    text = f"{facts.tokenizer}, {config.vocab_size:,} tokens; answers end at {ends}"
    if not facts.ends:
        yield Finding("tokenizer", "bad", text, "name eos_token_id in config.json, or no answer ever ends")
    elif facts.fault:
        yield Finding("tokenizer", "bad", f"{text}; {facts.fault}", "take the instruction-tuned model, or add one")
    else:
        yield good("tokenizer", f"{text}; with a chat template", ends=facts.ends)
    yield _engines(config, facts, count)
    yield _drafter(config)


def _engines(config: TargetConfig, facts: ModelFacts, count: int) -> Finding:
    from export.target.target_plan import LOADED, bundle_bytes

    memory = {f"onnx_{bits}": int(LOADED[bits] * bundle_bytes(config, bits)) for bits in (8, 4, 32)}
    if facts.torch:
        memory |= {"torch_float32": 4 * count, "torch_bfloat16": 2 * count}
    row = 8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    sizes = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.1f} GB" for name, size in memory.items())
    text = f"served by onnx{' and torch' if facts.torch else ''}; memory: {sizes}, and {row / 1e3:,.0f} kB a token"
    figures = {"memory": memory, "bytes_per_token": row}
    if facts.torch and not importlib.util.find_spec("torch"):
        return Finding("engines", "warning", text, "torch is not installed: pip install 'outrider[torch]'", figures)
    return good("engines", text, **figures)


def _drafter(config: TargetConfig) -> Finding:
    """Report this installation's drafters whose shapes fit, or what works without one."""
    fitting = list[str]()
    for path in sorted(drafters_folder().glob("*/config.json")):
        with suppress(OSError, ValueError, TypeError, AttributeError):
            values = json.loads(path.read_text())
            wanted = values["target_kv_heads"], values["target_head_dim"], values["hidden_size"], values["vocab_size"]
            if wanted == (config.num_key_value_heads, config.head_dim, config.hidden_size, config.vocab_size):
                fitting.append(path.parent.name)
    if fitting:
        return good("drafter", f"{', '.join(fitting)} has its shapes", drafters=fitting)
    advice = (
        "train one (outrider export train --target ...), or let an understudy draft (export bundle --understudy ...)"
    )
    return Finding("drafter", "warning", "no drafter here has its shapes", advice)


def _gguf_facts(source: TargetSource) -> tuple[TargetConfig, ModelFacts]:
    from outrider_core.targets.gguf_tokenizer import gguf_chat

    weights = source.gguf()
    fields = weights.fields
    kind = f"byte-level BPE split as {fields.get('tokenizer.ggml.pre', 'default')}"
    kind = kind if fields["tokenizer.ggml.model"] == "gpt2" else "SentencePiece BPE"
    ends = {fields["tokenizer.ggml.tokens"][index]: index for index in weights.eos_ids}
    return weights.config, ModelFacts(weights.formats, kind, gguf_chat(fields).fault(), ends, torch=False)


def _folder_facts(source: TargetSource) -> tuple[TargetConfig, ModelFacts]:
    from outrider_core.targets.quantised import Quantisation
    from outrider_core.targets.weights import read_json, stored_formats

    config, folder = source.shape(), source.path
    quantisation, formats = Quantisation.of(read_json(folder / "config.json")), stored_formats(folder)
    chat = chat_tokenizer_in(folder)
    ends = {chat.tokenizer.id_to_token(index) or str(index): index for index in source.eos_ids}
    kind = type(chat.tokenizer.model).__name__
    if quantisation:
        formats = Counter({f"{quantisation.name} of {'/'.join(formats)}": formats.total()})
    return config, ModelFacts(formats, kind, chat.fault(), ends, torch=quantisation is None)
