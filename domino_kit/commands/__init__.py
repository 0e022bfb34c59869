"""The commands of `domino`, a module for each kind of work."""
