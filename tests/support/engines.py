"""The engine of a run, ready for its first step."""

from olmo_sparsity.config.load import Config
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.build import build_engine, prepare_model
from olmo_sparsity.training.engine import Engine


def prepared_engine(config: Config) -> Engine:
    """With a model of freshly drawn weights."""
    engine = build_engine(config)
    prepare_model(engine, config, build_model(config))
    return engine
