"""`outrider doctor --model`: its report on each kind of model, without loading any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outrider.cli import device as command
from outrider.cli.doctor import Finding
from outrider.cli.model_report import look_at_model
from outrider_core.targets.config import TargetConfig
from tests.targets.gguf_files import LLAMA, llama_arrays, llama_fields, random_arrays, tokenizer_fields, write_gguf
from tests.tiny import save_tiny_target, tiny_model, tiny_tokenizer


def found(name: str | Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in look_at_model(str(name))}


def gguf(folder: Path, **tokenizer: object) -> Path:
    template = {"tokenizer.chat_template": "{{ messages }}<|im_end|>"}
    fields = llama_fields({**tokenizer_fields(**tokenizer), **template})
    return write_gguf(folder / "a.gguf", fields, llama_arrays(random_arrays(TargetConfig.from_json(LLAMA))))


def test_the_default_target() -> None:
    findings = found("smollm2-135m-instruct")
    assert list(findings) == ["model", "tokenizer", "engines", "drafter"]
    assert all(finding.level == "good" for finding in findings.values())
    assert findings["model"].figures["weights"] == 134_515_008
    assert findings["model"].text.startswith("llama, 135 million weights (79 % Q4_1, 21 % Q8_0")
    assert findings["tokenizer"].figures["ends"] == {"<|im_end|>": 2}
    assert findings["drafter"].figures["drafters"] == ["smollm2-135m-instruct-moa"]


def test_a_gguf_file(tmp_path: Path) -> None:
    findings = found(gguf(tmp_path))
    assert "byte-level BPE split as gpt-2, 300 tokens; answers end at <|endoftext|>, <|im_end|>" in (
        findings["tokenizer"].text
    )
    assert "served by onnx; memory: onnx 8" in findings["engines"].text
    assert findings["engines"].figures["bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, floats
    assert findings["drafter"].level == "warning" and "export bundle --understudy" in findings["drafter"].advice


def test_a_folder(tmp_path: Path) -> None:
    save_tiny_target(tmp_path, tiny_model("gemma3_text", dtype=torch.float32))
    findings = found(tmp_path)
    assert findings["model"].text.startswith("gemma3_text, 0 million weights (100 % F32)")
    assert findings["tokenizer"].figures["ends"] == {"</s>": 3}
    assert "served by onnx and torch" in findings["engines"].text
    assert "export train" in findings["drafter"].advice


@pytest.mark.parametrize(
    ("text", "says"),
    [('{"model_type": "qwen3_moe"}', "mixtures of experts; vLLM serves it"), ("[]", "is not a JSON object")],
)
def test_a_model_that_is_not_served(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    findings = found(tmp_path)
    assert list(findings) == ["model"] and findings["model"].level == "bad"
    assert says in findings["model"].text and findings["model"].advice


def test_what_a_model_lacks(tmp_path: Path) -> None:
    save_tiny_target(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert "no chat template" in found(tmp_path)["tokenizer"].text
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({**values, "eos_token_id": None}))
    tokenizer = found(tmp_path)["tokenizer"]
    assert tokenizer.level == "bad" and "eos_token_id" in tokenizer.advice


@pytest.mark.parametrize(
    ("template", "says"),
    [("{% for %}", "Expected an expression"), ("{{ 1 + 'a' }}", "TypeError: "), ("{{ raise_exception('no') }}", "no")],
)
def test_a_template_that_fails(tmp_path: Path, template: str, says: str) -> None:
    arrays = llama_arrays(random_arrays(TargetConfig.from_json(LLAMA)))
    fields = llama_fields({**tokenizer_fields(), "tokenizer.chat_template": template})
    save_tiny_target(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    for place in (tmp_path, write_gguf(tmp_path / "a.gguf", fields, arrays)):
        tokenizer = found(place)["tokenizer"]
        assert tokenizer.level == "bad" and f"its chat template fails: {says}" in tokenizer.text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "[1]", "tokenizer.json does not load"),
        ("tokenizer.json", '{"model": null}', "tokenizer.json does not load"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", "{,", "tokenizer_config.json does not load"),
        ("chat_template.jinja", b"\xe9", "chat_template.jinja does not load"),
        ("generation_config.json", '{"eos_token_id": [3, 5000]}', r"eos_token_id is [3, 5000], not a token's id"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id is True, not a token's id"),
        ("model.safetensors", -64, "is cut short; download the file again"),
    ],
)
def test_a_damaged_folder(tmp_path: Path, name: str, content: str | bytes | int, says: str) -> None:
    """content: of the file then, or where it ends."""
    save_tiny_target(tmp_path)
    path = tmp_path / name
    whole = content.encode() if isinstance(content, str) else content
    path.write_bytes(path.read_bytes()[:whole] if isinstance(whole, int) else whole)
    [finding] = look_at_model(str(tmp_path))
    assert finding.level == "bad" and says in finding.text and "\n" not in finding.text


def test_a_tokenizer_with_more_tokens_than_rows(tmp_path: Path) -> None:
    save_tiny_target(tmp_path, tiny_model(vocab=150), tiny_tokenizer(199))
    assert "tokenizer.json has 199 tokens, and config.json 150" in found(tmp_path)["model"].text


def test_several_templates_without_a_default_one(tmp_path: Path) -> None:
    save_tiny_target(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for template in ([{"name": "rag", "template": "x"}], [1], {"default": "x"}):
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
        assert "no chat template" in found(tmp_path)["tokenizer"].text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", "--model", str(gguf(tmp_path)), "--json"]) == 0
    assert [finding["name"] for finding in json.loads(capsys.readouterr().out)] == [
        "model", "tokenizer", "engines", "drafter",
    ]  # fmt: skip
    assert command.main(["doctor", "--model", str(tmp_path / "nowhere.gguf")]) == 1
    assert "no such file" in capsys.readouterr().out
