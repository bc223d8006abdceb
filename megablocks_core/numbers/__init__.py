"""Numbers of 8 and 4 bits: their formats, and tensors and blocks rounded under scales.

Training in low precision and quantised files share these. Nothing here knows a recipe, a layer, a
file or a group.
"""
