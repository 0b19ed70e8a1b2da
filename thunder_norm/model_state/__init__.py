"""What a program may change besides its results: attributes, containers, tensors' data, random generators.  Kept, or cleaned."""

from thunder_norm.model_state.undisturbed import undisturbed

__all__ = ["undisturbed"]
