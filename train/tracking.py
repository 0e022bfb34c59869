"""A run's numbers sent to wandb or trackio too, beside metrics.jsonl and TensorBoard."""

import importlib
import secrets
from typing import Any

from domino_kit.checkpoint import write_whole
from domino_kit.train.recipe import Recipe

ID_NAME = "tracking_id.txt"
"""File of a run's folder with the id under which it is tracked, so that a resumed run goes on there."""


def load_tracker(recipe: Recipe) -> Any:
    """The module that ``output.tracker`` names, or ``None``.

    Raises ``ValueError`` if it is not installed or broken.
    """
    name = recipe.output.tracker
    if name == "none":
        return None
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"output.tracker is {name}, which cannot be imported ({error}); install it with "
            f"pip install 'domino-kit[{name}]', or set output.tracker=none."
        ) from None


class Tracker:
    """wandb or trackio through what both have: ``init``, ``log`` with a step, and ``finish``.

    Where the numbers go (account, server, offline) is the tracker's own matter: its environment
    variables and login apply.
    """

    def __init__(self, module: Any, recipe: Recipe) -> None:
        """Start the run, or go on with that of the folder; its config is the recipe.

        Raises ``ValueError`` if wandb refuses, for example without a login.
        """
        self.module = module
        output = recipe.output
        kept = output.folder / ID_NAME
        run_id = kept.read_text("utf-8").strip() if kept.exists() else secrets.token_hex(4)
        options: dict[str, Any] = {
            "project": output.tracker_project,
            "name": f"{output.folder.resolve().name}-{run_id}",  # trackio knows a run by it
            "config": recipe.model_dump(mode="json"),
            "resume": "allow",
        }
        refused: tuple[type[Exception], ...] = ()
        if output.tracker == "wandb":
            options["id"], refused = run_id, (module.Error,)
        try:
            module.init(**options)
        except refused as error:
            raise ValueError(f"output.tracker={output.tracker} cannot start: {error}") from None
        output.folder.mkdir(parents=True, exist_ok=True)  # not before: a refused run leaves none
        write_whole(kept, run_id)

    def log(self, step: int, phase: str, values: dict[str, float]) -> None:
        """Numbers of one step, named as in TensorBoard."""
        self.module.log({f"{phase}/{name}": value for name, value in values.items()}, step=step)

    def finish(self) -> None:
        """Hand over what is left."""
        self.module.finish()
