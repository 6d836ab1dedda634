"""Small networks trained in NumPy float64 on one device: what every backend must reproduce.

`train(NETWORKS["mlp"], make_optimizer("torch", "sgd"), data=dataset("mlp"), global_batch_size=4)` gives the weights,
losses and gradient norms that any number of devices must give too. Nothing here imports a framework.
"""

from unidist.testing.golden.clipping import Clip, clip_by_norm, clip_by_value, global_norm
from unidist.testing.golden.data import Data, dataset, sample_weights
from unidist.testing.golden.layers import Array, Dense, Embedding, Layer, MeanOverPositions, Tanh, Weights
from unidist.testing.golden.losses import CROSS_ENTROPY, MSE, Loss, class_sample_weights, mean, total_and_weight
from unidist.testing.golden.networks import NETWORKS, Network, initial_weights, torch_layout
from unidist.testing.golden.optimizers import KerasAdam, KerasSGD, Optimizer, TorchAdam, TorchSGD, make_optimizer
from unidist.testing.golden.training import Result, Sums, batches, compute_sums, train, train_windows, windows

__all__ = [
    "CROSS_ENTROPY",
    "MSE",
    "NETWORKS",
    "Array",
    "Clip",
    "Data",
    "Dense",
    "Embedding",
    "KerasAdam",
    "KerasSGD",
    "Layer",
    "Loss",
    "MeanOverPositions",
    "Network",
    "Optimizer",
    "Result",
    "Sums",
    "Tanh",
    "TorchAdam",
    "TorchSGD",
    "Weights",
    "batches",
    "class_sample_weights",
    "clip_by_norm",
    "clip_by_value",
    "compute_sums",
    "dataset",
    "global_norm",
    "initial_weights",
    "make_optimizer",
    "mean",
    "sample_weights",
    "torch_layout",
    "total_and_weight",
    "train",
    "train_windows",
    "windows",
]
