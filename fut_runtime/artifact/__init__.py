"""The artifact format: manifest, tensor names and shapes, fragment order, reading, writing, verification.

`docs/artifact.md` is the specification. Nothing outside this package (and the kernels) may know the fragment order.
"""
