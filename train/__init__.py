"""Training a Domino draft: data, target features, objective, loop."""

if __name__ == "train":
    raise ImportError("This package is domino_kit.train; import it by that name, not as 'train'.")
