"""Blocks: the bytes of one storage, where they are, and who has a claim on them.

block.py      the states of a block, and what leads from one to the next
tickets.py    a saved tensor's claim on a block
registry.py   finds the block of a storage at a version, for as long as it lives
placement.py  where a saved tensor may go, as a policy says
"""
