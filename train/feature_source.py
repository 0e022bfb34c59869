"""Which features a run trains on: the target in process, an SGLang server, or files."""

from collections.abc import Iterator
from contextlib import contextmanager

from domino_kit.train.cached_features import CachedFeatures, facts_of
from domino_kit.train.features import FeatureSource, RowEncoder, encode_row
from domino_kit.train.setup import Run


@contextmanager
def row_encoder(run: Run, *, needs_hidden: bool) -> Iterator[RowEncoder]:
    """The encoder that the recipe asks for, for the time of the block.

    ``needs_hidden`` asks for last hidden rows beside the features. Raises ``ValueError`` if stored
    features do not fit the run.
    """
    features = run.recipe.features
    if features.backend == "cached":
        assert features.folder is not None, "the recipe was checked"
        wanted = facts_of(run, hidden=needs_hidden)
        cached = CachedFeatures(features.folder, wanted, run.target.device)
        cached.check([*run.samples, *run.validation])
        yield cached
    else:
        yield encode_row(run.target)


@contextmanager
def open_source(run: Run, given: FeatureSource | None = None) -> Iterator[FeatureSource]:
    """A run's source of features, or the ``given`` one, for the time of the block.

    Raises what :func:`row_encoder` raises.
    """
    if given is not None:
        yield given
        return
    with row_encoder(run, needs_hidden=run.recipe.needs_hidden) as encode:
        yield FeatureSource(encode, run.recipe.train.feature_cache_mb)
