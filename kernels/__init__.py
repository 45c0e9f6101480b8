"""Tensor operations behind one seam. Kept empty: transformers imports a PyPI package of this very name."""
