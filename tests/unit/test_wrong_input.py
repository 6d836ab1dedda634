"""What a user reads after a mistake: the type of the error and what it says, with nothing lost (torch, one process)."""

import numpy
import pytest
import torch

import unidist
from unidist_torch.devices import pick


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setenv("UNIDIST_TRAIN_QUIET", "1")
    with unidist.init(backend="local", framework="torch") as context:
        yield context


def made_by(module):
    """An object whose class says that it comes from a module."""
    return type("Model", (), {"__module__": module})()


def test_everything_needs_init():
    for call in (unidist.barrier, unidist.device, unidist.backend, unidist.scope, lambda: unidist.all_reduce(1.0),
                 lambda: unidist.wrap_model(torch.nn.Linear(1, 1)), unidist.current):  # fmt: skip
        with pytest.raises(unidist.NotInitializedError, match="unidist.init"):
            call()


def test_libraries_may_ask_before_init():
    assert (unidist.rank(), unidist.world_size(), unidist.local_rank(), unidist.num_replicas()) == (0, 1, 0, 1)
    assert unidist.is_main_process() and not unidist.is_initialized()
    unidist.shutdown()


def test_twice_with_the_same_arguments_is_fine_and_with_others_an_error(job):
    assert unidist.init(backend="local", framework="torch") is job
    with pytest.raises(RuntimeError, match="shutdown"):
        unidist.init(backend="ddp")


def test_a_timeout_is_positive():
    with pytest.raises(ValueError, match="seconds"):
        unidist.init(backend="local", framework="torch", timeout=0)


@pytest.mark.parametrize(
    "obj, says",
    [(made_by("tensorflow.python.x"), "of tensorflow"), (made_by("tf_keras.src.engine"), "Keras 2"), (object(), "builtins.object")],
)
def test_a_model_of_something_else(job, obj, says):
    for wrap in (unidist.wrap_model, unidist.wrap_optimizer):
        with pytest.raises(unidist.FrameworkMismatchError, match=says):
            wrap(obj)


def test_an_optimizer_of_another_model(job):
    model = unidist.wrap_model(torch.nn.Linear(2, 2))
    with pytest.raises(unidist.MismatchError, match=r"not the model's 2"):
        unidist.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1), model)
    with pytest.raises(TypeError, match="nesterov_typo"):
        unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, nesterov_typo=True)


def test_a_model_is_wrapped_once(job):
    model = unidist.wrap_model(torch.nn.Linear(2, 2))
    with pytest.raises(unidist.UnsupportedError, match="already"):
        unidist.wrap_model(model)


def test_a_lazy_module_asks_for_a_first_batch(job):
    with pytest.raises(unidist.UnsupportedError, match="weight.*one batch"):
        unidist.wrap_model(torch.nn.LazyLinear(2))


def test_the_other_frameworks_verb(job):
    with pytest.raises(unidist.FrameworkMismatchError, match="backward"):
        unidist.reduce_gradients([])


def test_data_that_can_not_be_wrapped(job):
    with pytest.raises(unidist.FrameworkMismatchError, match="TensorFlow"):
        unidist.wrap_data(made_by("tensorflow.python.data"), global_batch_size=2)
    with pytest.raises(TypeError, match="can't read a int"):
        unidist.wrap_data(3, global_batch_size=2)
    with pytest.raises(ValueError, match="different numbers of rows"):
        unidist.wrap_data((numpy.zeros(3), numpy.zeros(4)), global_batch_size=2)
    with pytest.raises(TypeError, match="num_workers"):
        unidist.wrap_data(numpy.zeros(3), global_batch_size=2, num_workers=2)
    with pytest.raises(ValueError, match="known length"):
        unidist.wrap_data(iter([1, 2]), global_batch_size=2, shuffle=True)
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=3)
    with pytest.raises(ValueError, match="batch_size=3 could mean either"):
        unidist.wrap_data(loader)


def test_steps_that_can_not_be_made(job):
    model = unidist.wrap_model(torch.nn.Linear(1, 1))
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match="either loss or compute_loss"):
        unidist.make_train_step(model, optimizer)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        unidist.make_train_step(model, optimizer, torch.nn.functional.mse_loss, gradient_accumulation_steps=0)
    with pytest.raises(ValueError, match="clip_norm"):
        unidist.make_train_step(model, optimizer, torch.nn.functional.mse_loss, clip_norm=-1.0)
    step = unidist.make_train_step(model, optimizer, torch.nn.functional.mse_loss)
    with pytest.raises(unidist.UnsupportedError, match="one value per sample"):
        step((torch.ones(2, 1), torch.ones(2, 1), torch.ones(2)))
    with pytest.raises(ValueError, match="max_norm or max_value"):
        unidist.clip_gradients(optimizer)


def test_weights_that_do_not_fit_change_nothing(job):
    model = unidist.wrap_model(torch.nn.Linear(2, 1))
    before = unidist.get_weights(model)
    with pytest.raises(unidist.MismatchError, match="missing.*bias"):
        unidist.set_weights(model, {"weight": numpy.zeros((1, 2))})
    with pytest.raises(unidist.MismatchError, match="shape"):
        unidist.set_weights(model, {"weight": numpy.zeros((2, 2)), "bias": numpy.zeros(1)})
    after = unidist.get_weights(model)
    assert all((before[name] == after[name]).all() for name in before)


def test_visible_devices_and_workers():
    """One visible device is used whatever the local rank; too few are an error with both numbers."""
    assert [pick(rank, 4, 1) for rank in range(4)] == [0, 0, 0, 0] and [pick(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(unidist.LaunchError, match="2 GPUs to 4 workers"):
        pick(0, 4, 2)


def test_collectives_refuse_what_has_no_answer(job):
    with pytest.raises(ValueError, match="op is one of"):
        unidist.all_reduce(1.0, "average")
    with pytest.raises(TypeError, match="mean of int64"):
        unidist.all_reduce(3)
    with pytest.raises(TypeError, match="sum of bool"):
        unidist.all_reduce(True, "sum")
    with pytest.raises(TypeError, match="not str"):
        unidist.broadcast("text")
    with pytest.raises(ValueError, match="root is a rank from 0 to 0"):
        unidist.broadcast(1.0, root=1)
