"""Tensors: what is known of a saved tensor without holding its memory.

layout.py   how it views the bytes of its storage
weak.py     its storage, known weakly, and the counter of its version
live.py     which saved storages are alive, to the byte
"""
