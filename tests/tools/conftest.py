"""A tiny model with the shipped tokenizer, made once for all tests of the tools."""

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    import torch

    from tools.pocket.checkpoint import export
    from tools.pocket.model import Pocket, Shape
    from tools.pocket.start import structured_start
    from tools.pocket.tokenizer import save_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer()
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
