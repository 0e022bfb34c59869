"""Measuring a draft: replay, decode, report."""

if __name__ == "eval":
    raise ImportError("This package is domino_kit.eval; import it by that name, not as 'eval'.")
