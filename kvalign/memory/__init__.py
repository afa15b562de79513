"""Memory behind the window, imported only where sizes ask for one.

- `memories`: what the windows of all layers pass on, and what the queries of a pass take back.
- `memory`: where a layer's entries are stored and found.
- `plan`: how many entries a step takes back and in which layers, as it was measured on a model.
- `recall`, `recall_places`: which are taken back, and the positions that they get.
"""
