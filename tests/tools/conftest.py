"""A tiny model with the shipped tokenizer, made once for all tests of the tools."""

import pytest


@pytest.fixture(scope="session")
def trained_tokenizer():
    """The shipped tokenizer, trained once for all."""
    from tools.studies.pocket.tokenizer import train_tokenizer

    return train_tokenizer()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, trained_tokenizer):
    import torch

    from tools.studies.pocket.checkpoint import export
    from tools.studies.pocket.model import Pocket, Shape
    from tools.studies.pocket.start import structured_start
    from tools.studies.pocket.tokenizer import save_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = trained_tokenizer
    size = tokenizer.get_vocab_size()
    torch.manual_seed(0)
    model = Pocket(
        Shape(
            vocab=size,
            hidden=64,
            inner=64,
            layers=6,
            heads=4,
            kv_heads=2,
            head_dim=64,
            positions=4096,
        )
    )
    structured_start(model, [tokenizer.decode([i]) for i in range(size)], 0)
    export(model, folder)
    save_tokenizer(tokenizer, folder)
    return folder
