"""Serving a Domino draft through SGLang: the launcher, and the plugin that runs inside it."""

if __name__ == "serve":
    raise ImportError("This package is domino_kit.serve; import it by that name, not as 'serve'.")
