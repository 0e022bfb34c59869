"""Serving a Domino draft through SGLang (not part of this version yet)."""

if __name__ == "serve":
    raise ImportError("This package is domino_kit.serve; import it by that name, not as 'serve'.")
