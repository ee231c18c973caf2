"""A user's own GGUF file becomes a target, a drafter's target and an understudy, by the commands of docs/models.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from export.__main__ import main
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.target import open_target
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.source import TargetSource
from outrider_core.targets.weights import GgufWeights
from tests.targets.gguf_files import LLAMA, llama_arrays, llama_fields, random_arrays, tokenizer_fields, write_gguf

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"
WIDE = {**LLAMA, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
pytestmark = pytest.mark.usefixtures("throwaway_cache")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TargetSource:
    path = tmp_path_factory.mktemp("own") / "model.gguf"
    fields = llama_fields(
        {**tokenizer_fields(), "tokenizer.chat_template": TEMPLATE},
        **{"embedding_length": 64, "attention__head_count": 8, "attention__head_count_kv": 4},
    )
    write_gguf(path, fields, llama_arrays(random_arrays(TargetConfig.from_json(WIDE))))
    return TargetSource.resolve(str(path))


def test_torch_loads_it_with_the_products_own_tokenizer(source: TargetSource) -> None:
    files = open_target(source)
    assert files.model_hash == source.identity
    assert set(files.eos_ids) == set(GgufWeights(source.path).eos_ids)
    assert np.array_equal(files.tables()[0], GgufWeights(source.path).read("embed_tokens"))
    tokenizer = chat_tokenizer_of(files.tokenizer)
    assert len(tokenizer.encode("self.(x<tool_call>")) == 5
    with torch.inference_mode():
        assert files.load().model(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_a_drafter_is_trained_for_it(source: TargetSource, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab a\n12 3\nself\n(x\n")
    numbers = {"epochs": 4, "batch-tokens": 16, "max-new-tokens": 8, "max-tokens": 48, "slots": 4, "layers": 2}
    options = {
        "target": source.path,
        "prompts": prompts,
        "output-dir": tmp_path / "drafter",
        "work-dir": tmp_path / "w",
    }
    options |= numbers | {"follow-ups": 0, "sampled": 0, "draft-vocab": 64, "device": "cpu", "threads": 1}
    assert not main(["train", *(str(part) for name, value in options.items() for part in (f"--{name}", value))])
    config, _, drafter_hash = load_drafter(tmp_path / "drafter")
    assert config.target_hash == source.identity
    bundle = exported(source, tmp_path / "bundle", tmp_path / "drafter")
    assert bundle.manifest.drafter_hash == drafter_hash and bundle.has_understudy


def exported(source: TargetSource, folder: Path, drafter: Path | None = None) -> Bundle:
    options = BundleOptions(target=source, understudy=source, drafter=drafter, output_dir=folder, compare=False)
    write_bundle(options, Console(quiet=True))
    return open_bundle(folder)


def test_it_is_an_understudy_whose_padding_does_not_matter(source: TargetSource, tmp_path: Path) -> None:
    """Also for its own folder, where the tokens that fill the table have no names."""
    assert not exported(source, tmp_path / "bundle").manifest.has_drafter
    folder = TargetSource.resolve(str(open_target(source).folder))
    assert folder.identity == source.identity
    options = BundleOptions(target=folder, understudy=source, output_dir=tmp_path / "other")
    write_bundle(options, Console(quiet=True))
    entry = open_bundle(tmp_path / "other").manifest.understudy
    assert entry and not entry.barred
