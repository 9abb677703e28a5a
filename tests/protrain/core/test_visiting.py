"""Weights that visit the device between two passes."""

from __future__ import annotations

import pytest
import torch
from core_models import (
    adamw,
    assert_same,
    batches,
    freeze,
    open_session,
    stack,
    train,
    twin,
    weights,
    wrapped,
)

from axolotl.integrations.protrain.core.errors import AccessError


def test_what_is_written_on_the_device_is_trained_with() -> None:
    """Only this sees a write that stays on the device, or one that was not to be kept."""
    model = stack(num_layers=4)
    freeze(model, ("norm",))
    plain = twin(model)
    session = open_session(model, n_buffer=2)
    optimizer, other = wrapped(session), adamw(plain)
    for step in range(3):
        data = [batches(1, step)]
        assert train(model, optimizer, data, session) == train(plain, other, data)
        params, twins = [*model.parameters()], [*plain.parameters()]
        with session.full_params():
            for param, its_twin in zip(params, twins, strict=True):
                used = session.device.used_bytes()
                home = param.data_ptr()
                with session.visiting([param], writes=True), torch.no_grad():
                    taken = session.device.used_bytes() - used
                    assert taken in (0, param.nbytes)
                    assert (param.data_ptr() == home) == (not taken)
                    param.mul_(1.5)
                    its_twin.mul_(1.5)
                if taken:
                    with session.visiting([param]):
                        param.data.zero_()
                assert param.data_ptr() == home
                assert session.device.used_bytes() == used
    session.close()
    assert_same(weights(model), weights(plain))


def test_other_streams_may_read_and_write_what_visits() -> None:
    """NCCL sends weights on a stream of its own: only this sees it do so too early, or a
    copy to the host that does not wait for it."""
    model = stack(num_layers=3)
    session = open_session(model)
    device = session.device
    with session.full_params():
        with session.visiting(model.layers[1].parameters(), writes=True):
            tensors = [param.data for param in model.layers[1].parameters()]
            device.reads(tensors, device.fetch)
            device.writes(tensors, device.fetch)
    session.close()


def test_who_visits_enters_full_params_first() -> None:
    model = stack(num_layers=3)
    session = open_session(model)
    with pytest.raises(AccessError, match="inside of `full_params`"):
        with session.visiting(model.parameters()):
            pass
    session.close()
