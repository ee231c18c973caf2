"""Divide a step's capacity among accounts and their sessions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def fair_shares(accounts: Sequence[Hashable], demands: Sequence[int], capacity: int) -> list[int]:
    """Divide `capacity` among demands, first evenly among accounts, then evenly among each account's demands.

    No share is larger than its demand; what one leaves goes to the others. Whole numbers; the sum is
    min(capacity, sum(demands)).
    """
    members: dict[Hashable, list[int]] = {}
    for index, account in enumerate(accounts):
        members.setdefault(account, []).append(index)
    wants = [sum(demands[i] for i in group) for group in members.values()]
    shares = [0] * len(demands)
    for group, granted in zip(members.values(), _even(wants, capacity), strict=True):
        for index, share in zip(group, _even([demands[i] for i in group], granted), strict=True):
            shares[index] = share
    return shares


def _even(demands: Sequence[int], capacity: int) -> list[int]:
    """Raise all shares together until each demand is met or nothing is left; the first get the remainder."""
    shares, left = [0] * len(demands), capacity
    order = sorted(range(len(demands)), key=lambda i: demands[i])
    for place, index in enumerate(order):
        even, extra = divmod(left, len(order) - place)
        shares[index] = min(demands[index], even + (1 if extra and demands[index] > even else 0))
        left -= shares[index]
    return shares
