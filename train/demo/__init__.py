"""The demo's training data and the command that regenerates it."""
