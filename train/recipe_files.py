"""Recipe files: bundled names with presets, ``extends``, and ``section.key=value`` overrides."""

import difflib
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "recipes"
PRESETS = FOLDER / "presets"


def load_values(source: Path | str) -> dict[str, Any]:
    """The sections of a recipe, with everything that it extends already merged in.

    ``source`` is a file, or the name of a bundled recipe: a file of ``recipes/`` without its
    ending, and behind it any files of ``recipes/presets/``, as in ``qwen3-8b-dflash-3layers``;
    what stands later wins. Raises ``ValueError`` naming the recipe and what is wrong with it.
    """
    values: dict[str, Any] = {}
    for file in find_recipe(source):
        merge(values, _load(file, ()))
    return values


def find_recipe(source: Path | str, beside: Path | None = None) -> list[Path]:
    """The files that a path or a bundled name stands for; a path may be relative to ``beside``."""
    for place in (beside or Path(), Path()):
        if (place / source).is_file():
            return [place / source]
    parts = str(source).split("-")
    presets: list[Path] = []
    while len(parts) > 1 and (PRESETS / f"{parts[-1]}.yaml").is_file():
        presets.insert(0, PRESETS / f"{parts.pop()}.yaml")
    file = FOLDER / f"{'-'.join(parts)}.yaml"
    if not file.is_file():
        near = difflib.get_close_matches("-".join(parts), bundled_names(), n=1)
        hint = f"did you mean {near[0]}? The" if near else "the"
        raise ValueError(
            f"recipe {str(source)!r} does not exist; {hint} bundled recipes are "
            f"{', '.join(bundled_names())}, each also with -{', -'.join(preset_names())} behind."
        )
    return [file, *presets]


def bundled_names() -> list[str]:
    """Recipes that `domino train` knows by name."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def preset_names() -> list[str]:
    """What may follow such a name."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def merge(values: dict[str, Any], over: dict[str, Any]) -> None:
    """Put ``over``'s keys into ``values``, section by section."""
    for name, section in over.items():
        if isinstance(section, dict) and isinstance(values.get(name), dict):
            values[name].update(section)
        else:
            values[name] = dict(section) if isinstance(section, dict) else section


def _load(file: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """One file over the recipe that it ``extends``."""
    if file in above:
        raise ValueError(f"recipe {file} extends itself, through {above[-1]}.")
    loaded = _read_yaml(file)
    parent = loaded.pop("extends", None)
    if parent is None:
        return loaded
    if not isinstance(parent, str):
        raise ValueError(
            f"recipe {file}: extends is {parent!r}; give the name of a bundled recipe or a file "
            "beside this one."
        )
    values: dict[str, Any] = {}
    for each in find_recipe(parent, file.parent):
        merge(values, _load(each, (*above, file)))
    merge(values, loaded)
    return values


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"recipe {file} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ValueError(f"recipe {file} is not valid YAML: {where}.") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"recipe {file} is empty or not a mapping of sections.")
    return loaded


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set what ``section.key=value`` says; ``ValueError`` if it is not of that form."""
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or len(parts) != 2:
        raise ValueError(f"override {override!r} is not of the form section.key=value.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"override {override!r} has a value that is not valid YAML.") from None
    section = values.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise ValueError(f"recipe section {parts[0]!r} is {section!r}, not a mapping.")
    section[parts[1]] = number(value)


def number(value: Any) -> Any:
    """YAML 1.1 reads ``6e-4`` as a string; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
