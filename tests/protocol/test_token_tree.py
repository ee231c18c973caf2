"""Draft trees against naive recomputation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_core.protocol.tree import MAX_NODES, ROOT, TokenTree, TreeError
from outrider_core.protocol.wire import pack_tree, unpack_tree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 40) -> TokenTree:
    """Random trees: every node hangs below a random earlier one (or the root); twins are left out."""
    tokens: list[int] = []
    parents: list[int] = []
    seen: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, max_nodes))):
        parent, token = draw(st.integers(ROOT, len(tokens) - 1)), draw(st.integers(0, 5) | st.integers(0, 2**32 - 1))
        if (parent, token) not in seen:
            seen.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


def naive_path(tree: TokenTree, node: int) -> list[int]:
    return [] if node == ROOT else [*naive_path(tree, tree.parents[node]), node]


@given(trees())
def test_path(tree: TokenTree) -> None:
    assert [tree.path(node) for node in range(-1, len(tree))] == [naive_path(tree, n) for n in range(-1, len(tree))]


@given(trees())
def test_depths_count_the_path(tree: TokenTree) -> None:
    assert tree.depths == tuple(len(naive_path(tree, node)) for node in range(len(tree)))


@given(trees())
def test_ancestor_bits(tree: TokenTree) -> None:
    naive = [sum(1 << other for other in range(len(tree)) if other in naive_path(tree, n)) for n in range(len(tree))]
    assert tree.ancestor_bits() == naive


@given(trees(), st.integers(0, 6))
def test_child_lookup(tree: TokenTree, token: int) -> None:
    for parent in range(-1, len(tree)):
        found = [n for n in range(len(tree)) if tree.parents[n] == parent and tree.tokens[n] == token]
        assert tree.child(parent, token) == (found[0] if found else None)


@given(trees())
def test_every_node_is_its_parents_child(tree: TokenTree) -> None:
    assert [tree.child(p, t) for t, p in zip(tree.tokens, tree.parents, strict=True)] == list(range(len(tree)))


@given(trees())
def test_paths_are_the_token_sequences_of_the_leaves(tree: TokenTree) -> None:
    leaves = [node for node in range(len(tree)) if node not in tree.parents]
    naive = [tuple(tree.tokens[n] for n in naive_path(tree, leaf)) for leaf in leaves]
    assert list(tree.paths()) == naive


@given(trees(max_nodes=90))
def test_pack_round_trip(tree: TokenTree) -> None:
    assert unpack_tree(*pack_tree(tree)) == tree


@given(st.lists(st.integers(0, 9), max_size=MAX_NODES))
def test_chain_is_one_path(tokens: list[int]) -> None:
    tree = TokenTree.chain(tokens)
    assert list(tree.paths()) == ([tuple(tokens)] if tokens else [])


def test_largest_tree_packs_and_unpacks() -> None:
    tree = TokenTree.chain(range(MAX_NODES))
    assert unpack_tree(*pack_tree(tree)) == tree


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ((1,), (0,)),
        ((1, 2), (-1, 1)),
        ((1, 2), (1, -1)),
        ((1, 2), (-1, -2)),
        ((1, 2), (-1,)),
        ((1,), ()),
        ((5, 5), (-1, -1)),
        ((1, 5, 5), (-1, 0, 0)),
        (tuple(range(MAX_NODES + 1)), tuple(range(-1, MAX_NODES))),
    ],
    ids=["self", "self below", "later", "below the root", "short", "none", "twins", "twins deep", "too many"],
)
def test_no_tree(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(TreeError):
        TokenTree(tokens, parents)


def test_one_token_may_stand_under_two_parents() -> None:
    tree = TokenTree((1, 2, 5, 5), (-1, -1, 0, 1))
    assert (tree.child(0, 5), tree.child(1, 5)) == (2, 3)
