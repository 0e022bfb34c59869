"""Which features a run trains on: the target in process, an SGLang server, or files."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from domino_kit.train.cached_features import CachedFeatures, facts_of
from domino_kit.train.features import FeatureSource, RowEncoder, encode_row
from domino_kit.train.setup import Run


@contextmanager
def row_encoder(run: Run, *, needs_hidden: bool) -> Iterator[RowEncoder]:
    """The encoder that the recipe asks for, for the time of the block.

    ``needs_hidden`` asks for last hidden rows beside the features. Raises ``ValueError`` if stored
    features or a server do not fit the run, ``ServerError`` if the server fails.
    """
    features = run.recipe.features
    if features.backend == "cached":
        assert features.folder is not None, "the recipe was checked"
        wanted = facts_of(run, hidden=needs_hidden)
        cached = CachedFeatures(features.folder, wanted, run.target.device)
        cached.check([*run.samples, *run.validation])
        yield cached
    elif features.backend == "sglang":
        with _engine(run, needs_hidden) as encode:
            yield encode
    else:
        assert run.whole_target is not None, "the recipe was checked"
        yield encode_row(run.whole_target)


@contextmanager
def _engine(run: Run, needs_hidden: bool) -> Iterator[RowEncoder]:
    """An encoder that asks the recipe's server, or one of our own."""
    from domino_kit.serve.features import feature_server
    from domino_kit.train.engine_features import EngineFeatures

    wanted = facts_of(run, hidden=needs_hidden)
    longest = max(len(sample.input_ids) for sample in [*run.samples, *run.validation])
    with ExitStack() as stack:
        url = run.recipe.features.url
        if url is None:
            target = run.recipe.target
            url = stack.enter_context(
                feature_server(
                    target.name, wanted.layer_ids,
                    model_type=run.target.text_config.model_type,
                    device=run.target.device.type, dtype=wanted.dtype, longest=longest,
                    last_hidden=needs_hidden, trust_remote_code=target.trust_remote_code,
                )
            )  # fmt: skip
        encode = EngineFeatures(url, wanted, run.target.device)
        encode.check_server(longest)
        yield encode


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
