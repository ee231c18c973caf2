"""Drawings and tables in documents, made from the code: `python -m tests.drawings` writes them anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from edge_runtime.session.states import TRANSITIONS, State
from outrider_core.targets.families import FAMILIES, REFUSED
from outrider_core.targets.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from outrider_core.targets.weights import DTYPES
from tests.arrows import floors, imports_below, inner_rooms

ROOT = Path(__file__).parents[1]
DOCUMENTS = ROOT / "docs"


def rooms_drawing(package: str) -> str:
    """The rooms of `package` by floor, from the top, each with those that it imports."""
    arrows = inner_rooms(list(imports_below(ROOT, (package,))), package)
    levels = floors(arrows)
    width = max(map(len, arrows))
    lines = [
        f"{levels[room]}  {room:{width}}  {', '.join(sorted(arrows[room], key=lambda other: (-levels[other], other)))}"
        for room in sorted(arrows, key=lambda room: (-levels[room], room))
    ]
    return "\n".join(["```", *(line.rstrip() for line in lines), "```"])


def states_drawing() -> str:
    """The states of an answer as a Mermaid diagram; CANCEL and STOP, which end it from everywhere, are left out."""
    names = {state: state.name.lower() for state in State}
    lines = [f"    {name}: {state}" for state, name in names.items() if name != str(state)]
    for state, events in TRANSITIONS.items():
        ways: dict[State, list[str]] = {}
        for event, afters in events.items():
            for after in afters:
                ways.setdefault(after, []).append(event)
        lines += [f"    {names[state]} --> {names[after]}: {', '.join(by)}" for after, by in ways.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {names[State.DRAFTING]}", *lines, "```"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def families_table() -> str:
    rows = [(f"`{name}`", f"`{each.gguf}`" if each.gguf else "", each.differs) for name, each in FAMILIES.items()]
    return table(("model_type", "in GGUF files", "what differs from Llama"), rows)


def refused_table() -> str:
    rows = [(", ".join(f"`{name}`" for name in names.split()), why) for why, names in REFUSED.items()]
    return table(("model types and GGUF architectures", "why"), rows)


def formats_table() -> str:
    """Formats of weights, and the engines that read them."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import _type_traits

    plain = ", ".join(name for name in DTYPES if name.startswith(("F6", "F3", "F1", "BF")))
    packed = ", ".join(sorted(GGMLQuantizationType(kind).name for kind in _type_traits))
    rows = [
        (f"folder with safetensors: {plain}", "onnx, torch"),
        ("folder quantised by AWQ or GPTQ (4 bits), MLX (4 and 8 bits) or FP8", "onnx"),
        (f"GGUF file: F32, F16, {packed}", "onnx"),
        ("target bundle (`outrider export target`): 8, 4 or 32 bits", "onnx"),
    ]
    return table(("weights", "engines"), rows)


def pre_tokenizers_table() -> str:
    """Names that GGUF files give to rules, one line for each rule."""
    names: dict[PreTokenizer, list[str]] = {}
    for name, rule in PRE_TOKENIZERS.items():
        names.setdefault(rule, []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(each)}" for each in names.values())


#: documents and their drawings
DRAWINGS: dict[str, dict[str, Callable[[], str]]] = {
    "design.md": {"edge_runtime": lambda: rooms_drawing("edge_runtime"), "states": states_drawing},
    "models.md": {
        "families": families_table,
        "refused": refused_table,
        "formats": formats_table,
        "pre-tokenizers": pre_tokenizers_table,
    },
}


def drawn(name: str) -> str:
    """Document `name` with each drawing, between `<!-- drawing: ... -->` and `<!-- end -->`, as the code is now."""
    document = (DOCUMENTS / name).read_text(encoding="utf-8")
    for drawing, draw in DRAWINGS[name].items():
        begin, end = f"<!-- drawing: {drawing} -->\n", "<!-- end -->"
        before, found, rest = document.partition(begin)
        assert found, f"docs/{name} has no place for the drawing {drawing}"
        document = before + begin + draw() + "\n" + end + rest.partition(end)[2]
    return document


if __name__ == "__main__":
    for name in DRAWINGS:
        (DOCUMENTS / name).write_text(drawn(name), encoding="utf-8")
