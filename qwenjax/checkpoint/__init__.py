"""Checkpoints in the Hugging Face layout: `load` and `save`, and what they know of files, names and slices.

`shards` and `layout` need only the standard library; JAX comes with `loading` and `saving`.
"""
