"""Blocks are found by storage and version while they live, and hold no place afterwards."""

import torch

from offload.blocks.block import Block
from offload.blocks.placement import Placement
from offload.blocks.registry import Key, Registry, key_of
from offload.tensors.weak import VersionWitness


def block() -> Block:
    tensor = torch.zeros(4)
    return Block(tensor.untyped_storage(), VersionWitness(tensor), Placement.DISK)


def test_a_block_is_found_while_it_lives() -> None:
    registry = Registry()
    first, second = block(), block()
    registry.add((1, 0), first)
    registry.add((1, 1), second)
    assert registry.find((1, 0)) is first
    assert registry.find((1, 1)) is second
    assert registry.find((2, 0)) is None
    del first
    assert registry.find((1, 0)) is None
    assert len(registry) == 1


def test_the_death_of_a_block_leaves_the_one_that_took_its_place() -> None:
    registry = Registry()
    first, second = block(), block()
    registry.add((1, 0), first)
    del first
    registry.add((1, 0), second)
    assert registry.find((1, 0)) is second
    third = block()
    registry.add((1, 0), third)
    del second
    assert (registry.find((1, 0)), len(registry)) == (third, 1)


def test_the_dead_are_forgotten_as_others_are_added() -> None:
    registry = Registry()
    for number in range(1000):
        registry.add((number, 0), block())
    assert len(registry._known) <= 2


def test_one_storage_is_known_by_whose_version_it_is() -> None:
    """Views share the counter of their base; ``Tensor.data`` has one of its own."""
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()

    held = []

    def key(of: torch.Tensor) -> Key:
        key, base = key_of(of, storage, storage.nbytes())
        held.append(base)
        return key

    data = tensor.data
    assert key(tensor) == key(tensor[1:]) == key(tensor[1:].view(3, 1))
    assert key(tensor) != key(data) == key(data)
    before = key(tensor)
    tensor[0] = 1
    assert key(tensor) != before
    before = key(tensor)
    storage.resize_(32)
    assert key(tensor) != before


def test_no_other_base_is_taken_for_one_whose_block_lives() -> None:
    registry, storage = Registry[Block](), torch.zeros(4).untyped_storage()
    held, found = block(), []
    for _ in range(50):
        tensor = torch.empty(0).set_(storage)
        key, base = key_of(tensor, storage, storage.nbytes())
        found.append(registry.find(key))
        if not registry.living():
            registry.add(key, held, base)
        del tensor, base
    assert found == [None] * 50
    assert registry.living() == [held]
