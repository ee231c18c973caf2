"""A small understudy in a bundle, and what Python computes with it, for the tests of browser_runtime.

python -m tests.browser.make_understudy FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from outrider_core.protocol.sampling import Sampling
from tests.targets.understudies import (
    CONTEXT,
    PROMPT,
    VOCAB,
    a_loop,
    asking,
    drafts,
    pythons_logits,
    steps,
    understudy_bundle,
)


def main(folder: Path) -> None:
    os.environ["OUTRIDER_CACHE"] = str(folder / "cache")
    bundle = understudy_bundle(folder)
    asked = steps(VOCAB)
    pythons_logits(bundle, asked).tofile(folder / "logits.f32")
    answers, wanted = drafts(bundle)
    text, tokens, looped = a_loop(bundle)
    found = [{"agreed": agreed, "tokens": own, "probabilities": p} for agreed, own, p in wanted]
    for begin, own in ((len(PROMPT), tokens), (len(text), looped)):
        answers.append(asking(text, begin, [], 20, Sampling()))
        found.append({"agreed": 0, "tokens": own, "probabilities": None})
    expected = {"context": CONTEXT, "vocab": VOCAB, "steps": asked, "answers": answers, "found": found}
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
