"""The understudy draws as the target does, judges what others wrote, and breaks its own loops."""

from __future__ import annotations

import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.bundle.understudy import write_understudy
from outrider_core.drafting.bundle import MANIFEST, UNDERSTUDY_FOLDER, Bundle, BundleError, open_bundle
from outrider_core.protocol.constraint import Constraint, Rules, pack_bias
from outrider_core.protocol.sampling import Sampling, draw
from outrider_core.targets import understudy as module
from outrider_core.targets.bundle import open_target_bundle
from outrider_core.targets.identity import model_identity
from outrider_core.targets.part import Part
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.source import TargetSource
from outrider_core.targets.understudy import DRY_ALLOWED, READ_CHUNK, Decoding, Understudy, UnderstudyError, repetitions
from tests.edge_runtime.test_probe import tiny_bundle
from tests.targets.plain import skip_unless_exact
from tests.tiny import tiny_model, tiny_tokenizer

CONTEXT = 192
PROMPT = [1, 17, 44, 101, 9]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=7)]
pytestmark = pytest.mark.usefixtures("throwaway_cache")


def source_of(folder: Path, vocab: int = 199) -> Path:
    tiny_model(hidden=64, seed=3, vocab=vocab, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer(vocab).save_pretrained(folder)
    return folder


def with_understudy(source: Path, folder: Path, bits: int = 8) -> Path:
    """`folder`, a bundle, with the model `source` as its understudy."""
    manifest = open_bundle(folder).manifest
    manifest.understudy = write_understudy(TargetSource.resolve(str(source)), folder, manifest.max_context, bits=bits)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("understudy")
    return with_understudy(source_of(work / "source"), tiny_bundle(work / "bundle", max_context=CONTEXT))


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Bundle:
    """A bundle that a test may break."""
    return open_bundle(shutil.copytree(folder, tmp_path / "copied"))


def made(bundle: Bundle) -> Understudy:
    entry, manifest = bundle.manifest.understudy, bundle.manifest
    assert entry
    folder = bundle.folder / entry.folder
    vocab, decode = manifest.vocab_size, bundle.tokenizer.decode
    return Understudy(folder, entry.manifest_sha256, manifest.max_context, vocab, decode, threads=1)


def plain(bundle: Bundle, count: int, sampling: Sampling) -> list[int]:
    """What the model writes behind PROMPT, token by token."""
    model = open_target_bundle(bundle.folder / UNDERSTUDY_FOLDER)
    runner = OnnxRunner.of(model, CONTEXT, threads=1)
    text = list(PROMPT)
    logits = runner.forward([Part(0, 0, tuple(PROMPT))])[0]
    while len(text) < len(PROMPT) + count:
        text.append(draw(logits, sampling, len(text)))
        logits = runner.forward([Part(0, len(text) - 1, (text[-1],))])[0]
    return text


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_it_writes_as_the_model_decodes(bundle: Bundle, sampling: Sampling) -> None:
    expected = plain(bundle, 24, sampling)
    assert not any(repetitions(expected[len(PROMPT) : end]) for end in range(len(expected))), "DRY would have a say"
    understudy, text = made(bundle), list(PROMPT)
    for _ in range(24):
        token, probability = understudy.next_token(text, Decoding(len(PROMPT), sampling))
        assert 0 < probability <= 1
        text.append(token)
    assert text == expected


def test_one_of_four_bits_writes_as_it_decodes(bundle: Bundle, tmp_path: Path) -> None:
    """Also where `export target` made it, whose report stays out of the bundle."""
    skip_unless_exact(4)
    source = source_of(tmp_path / "source")
    small = open_bundle(with_understudy(source, tiny_bundle(tmp_path / "bundle", max_context=CONTEXT), bits=4))
    entry, eight = small.manifest.understudy, bundle.manifest.understudy
    assert entry and eight and (entry.bits, eight.bits) == (4, 8) and entry.source_hash == eight.source_hash
    prepared = tmp_path / "prepared"
    shutil.copytree(small.folder / UNDERSTUDY_FOLDER, prepared)
    (prepared / "report.md").write_text("# Report")
    again = open_bundle(with_understudy(prepared, tiny_bundle(tmp_path / "again", max_context=CONTEXT)))
    assert again.manifest.understudy == entry and not (again.folder / UNDERSTUDY_FOLDER / "report.md").exists()
    expected, understudy = plain(small, 12, Sampling()), made(small)
    for end in range(len(PROMPT), len(expected)):
        assert understudy.next_token(expected[:end], Decoding(len(PROMPT)))[0] == expected[end]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_it_judges_what_others_wrote(bundle: Bundle, sampling: Sampling) -> None:
    expected = plain(bundle, 20, sampling)
    understudy, base = made(bundle), len(PROMPT) + 3
    for right in (0, 1, 9):
        text = expected[: base + right]
        wrong = [(expected[len(text)] + 1) % 199, 5, 6]
        assert understudy.agreed(text + wrong, base, Decoding(len(PROMPT), sampling)) == right
        assert understudy.next_token(text, Decoding(len(PROMPT), sampling))[0] == expected[len(text)]
    assert understudy.agreed(expected, base, Decoding(len(PROMPT), sampling)) == len(expected) - base


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_it_judges_and_writes_under_a_constraint(bundle: Bundle, sampling: Sampling) -> None:
    """A bias and a penalty for what stands there already, wherever the text was before."""
    ids, amounts = pack_bias({50: 6.0, 60: 6.0})
    constraint = Constraint(len(PROMPT), 2.0, 0.5, ids, amounts)
    model = open_target_bundle(bundle.folder / UNDERSTUDY_FOLDER)
    runner, text = OnnxRunner.of(model, CONTEXT, threads=1), list(PROMPT)
    logits = runner.forward([Part(0, 0, tuple(PROMPT))])[0]
    for _ in range(12):
        text.append(draw(Rules(constraint).adjusted(logits, text), sampling, len(text)))
        logits = runner.forward([Part(0, len(text) - 1, (text[-1],))])[0]
    assert text != plain(bundle, 12, sampling)
    understudy, rules, begin = made(bundle), Rules(constraint), len(PROMPT)
    assert understudy.agreed([*text[:-3], 7], begin + 2, Decoding(begin, sampling, rules)) == len(text) - 3 - begin - 2
    for end in (begin, len(text) - 3, begin + 4, len(text) - 1):
        assert understudy.next_token(text[:end], Decoding(begin, sampling, rules))[0] == text[end]


def test_a_text_may_change_anywhere(bundle: Bundle) -> None:
    understudy, fresh = made(bundle), list[tuple[int, float]]()
    texts = [PROMPT, [*PROMPT, 7, 8], PROMPT[:3], [*PROMPT[:3], 50], PROMPT, [*PROMPT, *range(10, 10 + READ_CHUNK + 3)]]
    kept = [understudy.next_token(text, Decoding(0)) for text in texts]
    for text in texts:
        fresh.append(made(bundle).next_token(text, Decoding(0)))
    assert kept == fresh


def test_a_reading_that_nobody_waits_for_is_given_up_and_goes_on_later(bundle: Bundle) -> None:
    understudy, text = made(bundle), list(range(4, 4 + 2 * READ_CHUNK + 5))
    asked = iter([False, False, True])
    assert not understudy.read(text, lambda: next(asked))
    assert understudy.read(text)
    assert understudy.next_token(text, Decoding(0)) == made(bundle).next_token(text, Decoding(0))


def test_judging_can_be_given_up_between_two_steps(bundle: Bundle) -> None:
    expected = plain(bundle, 2 * READ_CHUNK, Sampling())
    for allowed in range(5):
        cancelled, understudy = partial(next, iter([False] * allowed), True), made(bundle)
        agreed = understudy.agreed(expected, len(PROMPT), Decoding(len(PROMPT)), cancelled)
        assert agreed == (None if allowed < 4 else 2 * READ_CHUNK), "before it loads, reads, judges and judges on"
        assert understudy.loaded == (allowed > 0)
        assert understudy.next_token(expected, Decoding(0)) == made(bundle).next_token(expected, Decoding(0))


def test_it_draws_no_token_that_the_target_does_not_know(bundle: Bundle) -> None:
    """Vocabularies are padded, and a small model's may be padded to more than the target's."""
    known, text = 150, list(PROMPT)
    entry = bundle.manifest.understudy
    assert entry
    folder = bundle.folder / entry.folder
    beyond = 0
    understudy = Understudy(folder, entry.manifest_sha256, CONTEXT, known, bundle.tokenizer.decode, threads=1)
    wide = made(bundle)
    for seed in range(40):
        sampling = Sampling(temperature=1.5, seed=seed)
        free, bound = wide.next_token(text, Decoding(0, sampling)), understudy.next_token(text, Decoding(0, sampling))
        assert bound[0] < known and understudy.agreed([*text, bound[0]], len(text), Decoding(0, sampling)) == 1
        assert (free[0] == bound[0]) == (free[0] < known)
        beyond += free[0] >= known
    assert beyond


def test_its_memory_comes_with_the_first_use_and_goes_when_it_is_given_back(bundle: Bundle) -> None:
    understudy = made(bundle)
    assert not understudy.loaded
    first = understudy.next_token(PROMPT, Decoding(0))
    assert understudy.loaded
    understudy.unload()
    assert not understudy.loaded
    assert understudy.next_token(PROMPT, Decoding(0)) == first


def test_it_may_come_later_than_the_bundle(copied: Bundle) -> None:
    folder = copied.folder / UNDERSTUDY_FOLDER
    folder.rename(copied.folder / "elsewhere")
    assert not open_bundle(copied.folder).has_understudy
    with pytest.raises(UnderstudyError, match="is not there; fetch the bundle's understudy"):
        made(copied).load()
    (copied.folder / "elsewhere").rename(folder)
    assert open_bundle(copied.folder).has_understudy
    made(copied).load()


@pytest.mark.parametrize("name", ["manifest.json", "target.onnx", "target.onnx.data"])
def test_a_damaged_one_is_refused_in_one_line(copied: Bundle, name: str) -> None:
    path = copied.folder / UNDERSTUDY_FOLDER / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UnderstudyError) as caught:
        made(copied).load()
    assert "\n" not in str(caught.value) and UNDERSTUDY_FOLDER in str(caught.value)
    assert "copy this bundle's own" in str(caught.value) and "made again" not in str(caught.value)


@pytest.mark.parametrize("place", ["..", "../elsewhere", "/tmp", "a/b", "", "."])
def test_one_that_lies_elsewhere_is_refused(copied: Bundle, place: str) -> None:
    assert copied.manifest.understudy
    copied.manifest.understudy.folder = place
    (copied.folder / MANIFEST).write_bytes(msgspec.json.encode(copied.manifest))
    with pytest.raises(BundleError, match="not a plain file name"):
        open_bundle(copied.folder)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", vocab=150)
    bundle = tiny_bundle(tmp_path / "bundle", max_context=CONTEXT)
    with pytest.raises(BundleError, match="another vocabulary"):
        write_understudy(TargetSource.resolve(str(source)), bundle, CONTEXT)


def test_an_interrupted_export_of_another_one_leaves_nothing(tmp_path: Path) -> None:
    first, target = source_of(tmp_path / "first"), tiny_bundle(tmp_path / "bundle", max_context=CONTEXT)
    write_understudy(TargetSource.resolve(str(first)), target, CONTEXT)
    second = tmp_path / "second"
    tiny_model(hidden=64, seed=4, vocab=199, dtype=torch.float32).save_pretrained(second)
    tiny_tokenizer(199).save_pretrained(second)
    entry = write_understudy(TargetSource.resolve(str(second)), target, CONTEXT)
    assert open_target_bundle(target / UNDERSTUDY_FOLDER).source_hash == entry.source_hash == model_identity(second)


def test_a_model_that_reads_less_than_the_bundle_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source")
    bundle = tiny_bundle(tmp_path / "bundle", max_context=CONTEXT)
    with pytest.raises(BundleError, match="--max-context 512"):
        write_understudy(TargetSource.resolve(str(source)), bundle, 1000)


# loops


@given(st.lists(st.integers(0, 2), max_size=60))
def test_repetitions_by_brute_force(answer: list[int]) -> None:
    expected = dict[int, int]()
    for end in range(len(answer)):
        length = 0
        while length < end and answer[end - length - 1] == answer[len(answer) - length - 1]:
            length += 1
        if length >= DRY_ALLOWED:
            expected[answer[end]] = max(expected.get(answer[end], 0), length)
    assert repetitions(answer) == expected


class Looping:
    """A runner whose model always says the same twelve words, one after the other."""

    WORDS = tuple(range(20, 32))

    def forward(self, parts: list[Part]) -> np.ndarray:
        (part,) = parts
        ids = [*part.chain, *part.tree.tokens]
        logits = np.zeros((1 + len(part.tree), 199), np.float32)
        for row, token in enumerate(ids[-len(logits) :]):
            after = self.WORDS[(self.WORDS.index(token) + 1) % 12] if token in self.WORDS else self.WORDS[0]
            logits[row, after], logits[row, 40 + row] = 6.0, 5.0
        return logits


@pytest.mark.parametrize("fenced", [False, True])
def test_loops_end_but_not_in_code(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, fenced: bool) -> None:
    if fenced:
        monkeypatch.setattr(module, "FENCE", "w33")  # which the tokenizer can say
    understudy = made(bundle)
    understudy._runner = Looping()  # type: ignore[assignment]
    text = [*PROMPT, 33, 20]
    for _ in range(60):
        text.append(understudy.next_token(text, Decoding(len(PROMPT)))[0])
    answer = text[len(PROMPT) + 1 :]
    looped = all(token in Looping.WORDS for token in answer)
    assert looped == fenced


# drafts for the target


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_its_drafts_are_what_the_target_would_draw_of_its_logits(bundle: Bundle, sampling: Sampling) -> None:
    expected, understudy = plain(bundle, 40, sampling), made(bundle)
    size, decoding = len(PROMPT), Decoding(len(PROMPT), sampling)
    tokens, scores = understudy.draft(PROMPT, 12, decoding)
    assert tokens == expected[size : size + 12] and understudy.drafted == 12
    assert len(scores) == 12 and all(later <= sooner <= 0 for sooner, later in pairwise(scores))
    # the target draws the same, and goes on: nothing of it is drafted again
    understudy.draft_ahead(8, lambda: False)
    assert understudy.drafted == 20
    after, known = understudy.draft(expected[: size + 13], 7, decoding)
    assert after == expected[size + 13 : size + 20] and understudy.drafted == 20
    fresh = made(bundle).draft(expected[: size + 13], 7, decoding)
    assert fresh[0] == after and np.allclose(fresh[1], known)
    # fewer are wanted than are known
    assert understudy.draft(expected[: size + 13], 3, decoding)[0] == after[:3]
    # it draws otherwise
    other = [*expected[: size + 14], (expected[size + 14] + 1) % 199]
    assert understudy.draft(other, 5, decoding) == made(bundle).draft(other, 5, decoding)
    assert understudy.next_token(other, decoding) == made(bundle).next_token(other, decoding)


def test_a_draft_is_given_up_and_ends_with_the_context(bundle: Bundle) -> None:
    understudy = made(bundle)
    assert understudy.draft(PROMPT, 8, Decoding(len(PROMPT)), lambda: True) == ([], [])
    asked = iter([False] * 4)  # to begin with, to read, and to draft two more
    assert len(understudy.draft(PROMPT, 8, Decoding(len(PROMPT)), lambda: next(asked, True))[0]) in (2, 3)
    long = plain(bundle, CONTEXT - len(PROMPT) - 3, Sampling())
    assert len(understudy.draft(long, 8, Decoding(len(PROMPT)))[0]) == 3


def test_drafts_of_other_rules_are_not_taken(bundle: Bundle) -> None:
    understudy, free = made(bundle), made(bundle).draft(PROMPT, 6, Decoding(len(PROMPT)))[0]
    ids, amounts = pack_bias({free[0]: -100.0})
    rules = Rules(Constraint(len(PROMPT), 0.0, 0.0, ids, amounts))
    assert understudy.draft(PROMPT, 6, Decoding(len(PROMPT)))[0] == free
    bound = understudy.draft(PROMPT, 6, Decoding(len(PROMPT), Sampling(), rules))[0]
    assert free[0] not in bound and understudy.draft(PROMPT, 6, Decoding(len(PROMPT)))[0] == free
