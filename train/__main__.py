"""`python -m domino_kit.train`: what `torchrun` starts once for each process of a run."""

from domino_kit.cli import main, train

if __name__ == "__main__":
    main(train, "python -m domino_kit.train")
