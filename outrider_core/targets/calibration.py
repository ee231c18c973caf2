"""Calibration: collect the inputs of a target's linear layers on its own answers, to round weights by. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

from outrider_core import durable
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.answers import write_answers
from outrider_core.targets.batch import Batch
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.linears import INPUT, LARGEST, TABLE
from outrider_core.targets.part import POOL_BLOCK, Part
from outrider_core.targets.products import open_session

Doubles = NDArray[np.float64]
_Tensors = dict[str, NDArray[Any]]

#: prompts for the target; the kinds of text matter here, not their number
PROMPTS = (
    "Explain to a child why leaves change their colour in autumn.",
    "Write a Python function that returns the longest word of a sentence, with a docstring.",
    "A shop sells pencils at 30 cents and pens at 1.20 dollars. What do 7 pencils and 3 pens cost? Show each step.",
    "Give me a packing list for four days in the mountains.",
    "Translate into French: The train to the airport leaves every twenty minutes.",
    "Summarise in one sentence: Honey bees tell each other where flowers are by dancing. The angle of the dance shows "
    "the direction with respect to the sun, and its length shows how far it is. Other bees follow the dancer.",
    'Return a JSON object with the keys "title", "year" and "genres" for a film that you like.',
    "Write a polite email that asks the landlord to repair the heating.",
    "What are the advantages and drawbacks of working from home?",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "How does a refrigerator keep food cold?",
    "Correct the grammar: He don't knows where are the keys, because she have took them.",
    "Compare SQL and NoSQL databases in a table.",
    "Name five rivers in Asia, and the countries that they flow through.",
    "Write a limerick about a cat that hates Mondays.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "Implement a stack in JavaScript with push, pop and size.",
    "If all roses are flowers and some flowers fade quickly, do some roses fade quickly? Explain your reasoning.",
    "Suggest three names for a bakery, with a slogan for each.",
    "Who was Ada Lovelace, and why is she remembered?",
    "Describe how to change a bicycle tyre, step by step.",
    "Write a SQL query that finds the ten customers who spent most last month.",
    "Solve for x: 3x + 7 = 2(x - 4).",
    "Make a dialogue between a doctor and a patient with a sore throat.",
)
#: tokens of each answer
ANSWER_TOKENS = 80
SAMPLING = Sampling(temperature=0.7, seed=1)
#: bytes of moments held in memory at once; the texts are run once for each lot
MOMENT_BYTES = 128 << 20
#: a layer with more inputs is rounded to nearest: its moments would take too much memory and time
MOST_INPUTS = 8192


def write_texts(bundle: TargetBundle, done: Callable[[int, int], None] = lambda token, tokens: None) -> list[list[int]]:
    """Return token ids of PROMPTS and of the target's answers. done(token, tokens): called after every token."""
    return [answer.ids for answer in write_answers(bundle, PROMPTS, ANSWER_TOKENS, SAMPLING, done)]


class InputMoments:
    """Sums of x xᵀ over the inputs x of each linear layer, while the bundle's target reads `texts`.

    The moments for a bundle of 8 bits come from another one of 8 bits, those for 4 bits from one of 32: a layer's
    inputs are the same in both. Several layers are computed at once, and must be asked for in the graph's order.
    """

    def __init__(self, bundle: TargetBundle, texts: Sequence[Sequence[int]], most_bytes: int = MOMENT_BYTES) -> None:
        self._bundle, self._texts, self._most_bytes = bundle, texts, most_bytes
        self._graph = onnx.load(bundle.graph, load_external_data=False)
        dims = {tensor.name: tensor.dims for tensor in self._graph.graph.initializer}
        self._rounded = bundle.bits == 8
        self._products, self._widths = dict[str, int](), dict[str, int]()  # the product's node, and number of inputs
        for index, node in enumerate(self._graph.graph.node):
            if node.op_type in ("MatMulIntegerToFloat", "FusedMatMul") and node.input[1].endswith(TABLE):
                name = node.input[1].removesuffix(TABLE)
                self._products[name] = index
                self._widths[name] = dims[node.input[1]][0 if self._rounded else 1]
        self._moments = dict[str, Doubles]()
        self._begin, self._states = 0, [_Tensors() for _ in texts]  # each text is read up to this node

    def of(self, name: str) -> Doubles | None:
        """Return float64 [inputs, inputs]; None for a layer that is too wide."""
        if self._widths[name] > MOST_INPUTS:
            return None
        if name not in self._moments:
            self._moments = self._read(self._lot(name))
        return self._moments[name]

    def _lot(self, first: str) -> list[str]:
        """Return the layers from `first` on that fit into memory together."""
        names = list(self._widths)
        lot, size = list[str](), 0
        for name in names[names.index(first) :]:
            size += 8 * self._widths[name] ** 2
            if lot and size > self._most_bytes:
                break
            if self._widths[name] <= MOST_INPUTS:
                lot.append(name)
        return lot

    def _read(self, names: Sequence[str]) -> dict[str, Doubles]:
        """Read on to the last of these layers' products; the texts' tensors that later nodes need are kept."""
        end = self._products[names[-1]]
        wanted = {name: self._inputs(name) for name in names}
        known = self._made(0, self._begin)
        kept = self._used(end) & self._made(0, end)
        outputs = list(({each for inputs in wanted.values() for each in inputs} | kept) - known)
        session = self._session(end, outputs)
        fed = {each.name for each in session.get_inputs()}
        for index, text in enumerate(self._texts):
            feeds = _feeds(text, self._bundle.config) | self._states[index]
            found = session.run(outputs, {name: feeds[name] for name in fed})
            self._states[index] = self._states[index] | dict(zip(outputs, found, strict=True))
        moments = dict[str, Doubles]()
        for name, inputs in wanted.items():
            x, *largest = (np.concatenate([state[each] for state in self._states]) for each in inputs)
            wide = (x.astype(np.float64) - 128) * (largest[0] / 127) if largest else x.astype(np.float64)
            moments[name] = wide.T @ wide
        self._begin, self._states = end, [{name: state[name] for name in kept} for state in self._states]
        return moments

    def _inputs(self, product: str) -> list[str]:
        """Return the names of what a product reads: the input, or rounded ones and the largest of each row."""
        return [product + INPUT, product + LARGEST] if self._rounded else [self._node(product).input[0]]

    def _node(self, product: str) -> onnx.NodeProto:
        return self._graph.graph.node[self._products[product]]

    def _made(self, begin: int, end: int) -> set[str]:
        return {name for node in self._graph.graph.node[begin:end] for name in node.output}

    def _used(self, begin: int, end: int | None = None) -> set[str]:
        return {name for node in self._graph.graph.node[begin:end] for name in node.input}

    def _session(self, end: int, outputs: Sequence[str]) -> onnxruntime.InferenceSession:
        """Open the nodes from where the texts were read to `end`; inputs are what they lack."""
        whole, nodes = self._graph.graph, self._graph.graph.node[self._begin : end]
        used = self._used(self._begin, end)
        state = {name: value for name, value in self._states[0].items() if name in used}
        inputs = [each for each in whole.input if each.name in used] + [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim)
            for name, value in state.items()
        ]
        model = onnx.ModelProto()
        model.CopyFrom(self._graph)
        tables = [tensor for tensor in whole.initializer if tensor.name in used]
        made = [onnx.ValueInfoProto(name=name) for name in outputs]  # ONNX Runtime infers their types
        model.graph.CopyFrom(helper.make_graph(nodes, whole.name, inputs, made, tables))
        path = self._bundle.folder / "inputs.onnx"  # in this folder, where it finds its tables
        onnx.save(model, path)
        try:
            return open_session(str(path))
        finally:
            path.unlink()


def _feeds(text: Sequence[int], config: TargetConfig) -> dict[str, NDArray[np.generic]]:
    batch = Batch([Part(0, 0, tuple(text))], config)
    pool = np.zeros((batch.span.count, config.num_key_value_heads, POOL_BLOCK, config.head_dim), np.float32)
    pools = {f"{name}_{layer}": pool for layer in range(config.num_hidden_layers) for name in ("keys", "values")}
    return {**batch.feeds, "wanted": np.arange(len(text)), **pools}


def kept_texts(path: Path, write: Callable[[], list[list[int]]]) -> list[list[int]]:
    """Read the texts in a file, or write them if no earlier call has done so."""
    texts: list[list[int]]
    try:
        texts = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        texts = write()
        durable.write(path, json.dumps(texts))
    return texts
