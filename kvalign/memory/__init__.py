"""Memory behind the window: a guest of the cache, which does not know it.

- `cache`: a streaming cache whose window passes evicted entries on; `layer` is its kind of layer.
- `memory`: where they are stored and found; `search` and `sketch` make that fast.
- `recall`, `recall_places`: which are taken back, and the positions that they get.
"""
