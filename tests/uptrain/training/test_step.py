"""One step of training: clipping, the optimizer's numbers, and the state of random numbers."""

from __future__ import annotations

import pytest
import torch
from headfold.uptrain.loss.chunked import attach_chunked_loss
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.training import step as step_module
from headfold.uptrain.training.optim import make_optimizer
from headfold.uptrain.training.step import Stepper, StopRequested
from runs import OneProcess
from tiny import tiny_model


class _Batch:
    """Two micro-batches of random tokens."""

    def __init__(self, ids_BT: torch.Tensor) -> None:
        self._ids_BT, self.targets = ids_BT, ids_BT.numel() - len(ids_BT)
        self.inputs = {"input_ids": ids_BT}
        self.scored_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        self.scored_BT[:, -1] = False
        self.targets_N = ids_BT[:, 1:].flatten()

    def split(self, micro_batch: int) -> list[_Batch]:
        return [_Batch(part) for part in self._ids_BT.split(micro_batch)]

    def to(self, device: object) -> _Batch:
        return self


def _stepped(settings: UptrainSettings, *, rate: float = 1e-3):
    """Do one step, and return the result, the optimizer and the model."""
    model = tiny_model("llama", 4, 2, vocab_size=50, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    attach_chunked_loss(model)
    optimizer = make_optimizer(model, settings)
    ids_BT = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))
    stepper = Stepper(OneProcess(), model, optimizer, settings, lambda step: rate)
    return stepper(0, _Batch(ids_BT)), optimizer, model


def _settings(**changes: object) -> UptrainSettings:
    return UptrainSettings(**{"batch": 4, "micro_batch": 2, "weight_decay": 0.0, **changes})


@pytest.mark.parametrize("longest", [0.01, 1e9])
def test_gradients_are_clipped_to_the_norm_that_was_asked_for(longest, monkeypatch):
    kept: list[torch.Tensor] = []
    real = torch.optim.AdamW.step

    def step(self, *arguments):
        grads = [weight.grad for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        kept.append(torch.sqrt(sum(grad.square().sum() for grad in grads)))
        return real(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    result, *_ = _stepped(_settings(max_grad_norm=longest))
    assert result.gradient_norm > 0.02  # as it was before
    assert float(kept[0]) == pytest.approx(min(longest, result.gradient_norm), rel=1e-3)


def test_the_moments_decay_by_the_betas_of_the_settings():
    _, optimizer, _ = _stepped(_settings(beta1=0.7, beta2=0.6, max_grad_norm=1e9))
    assert all(group["betas"] == (0.7, 0.6) for group in optimizer.param_groups)
    # after one step the first moment is (1 − beta1) · g, and the second (1 − beta2) · g²
    states = [state for state in optimizer.state.values() if state["exp_avg"].abs().max() > 0]
    assert states
    for state in states:
        gradient = state["exp_avg"] / 0.3
        assert torch.allclose(state["exp_avg_sq"], 0.4 * gradient**2, rtol=1e-3, atol=1e-12)


def test_each_group_gets_the_rate_of_its_step():
    _, optimizer, model = _stepped(_settings(max_grad_norm=1e9), rate=0.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    fresh = tiny_model("llama", 4, 2, vocab_size=50, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    trained = dict(model.named_parameters())
    assert all(torch.equal(weight, trained[name]) for name, weight in fresh.named_parameters())


def test_an_abandoned_step_leaves_gradients_and_random_state_as_they_were(monkeypatch):
    """The step is done again after a resume, with the same dropout."""
    monkeypatch.setattr(step_module, "_PATIENCE_SECONDS", 0.0)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    made: list[torch.optim.Optimizer] = []
    real = step_module.Stepper._sums
    monkeypatch.setattr(step_module.Stepper, "_sums", lambda self, micro: (torch.rand(3), real(self, micro))[1])
    monkeypatch.setattr(
        step_module.Stepper, "_accumulate", _watched(step_module.Stepper._accumulate, made), raising=True
    )
    with pytest.raises(StopRequested):
        _stepped_from(before)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [weight for group in made[0].param_groups for weight in group["params"]]
    assert all(weight.grad is None or not weight.grad.any() for weight in weights)


def _watched(real, made):
    def accumulate(self, *arguments):
        made.append(self._optimizer)
        return real(self, *arguments)

    return accumulate


def _stepped_from(state: torch.Tensor) -> None:
    model = tiny_model("llama", 4, 2, vocab_size=50, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    attach_chunked_loss(model)
    settings = _settings()
    stepper = Stepper(OneProcess(), model, make_optimizer(model, settings), settings, lambda step: 1e-3)
    stepper.stop_requested = lambda: True
    torch.set_rng_state(state)  # making the model drew from it
    stepper(0, _Batch(torch.zeros(4, 12, dtype=torch.long)))
