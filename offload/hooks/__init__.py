"""Hooks: what autograd calls when it saves a tensor, and when backward wants it again.

pack.py      pack and unpack: the only code that autograd calls
kinds.py     which tensors never move
dtensor.py   wrappers of tensor parallelism, around the part that this rank holds
bundles.py   small storages leave and come back together
prefetch.py  what backward will ask for next, brought back ahead of it
"""
