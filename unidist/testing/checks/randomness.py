"""Contract 13: one seed for initial weights, streams per replica, loader workers, and the order of the data."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.context import current, current_backend
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.checks.data import seen
from unidist.testing.table import check, several_processes, several_replicas


def _again(bench: Bench, seed: int | None) -> None:
    """Leave the job and join it with another seed; the bench goes along."""
    request = {**current()._request, "seed": seed}
    unidist.shutdown()
    compare.true(not unidist.is_initialized(), "shutdown ended the job")
    compare.same((unidist.rank(), unidist.world_size()), (0, 1), "rank and size without a job")
    unidist.init(**request)
    bench.rejoin(current_backend())


def _fresh_weights(bench: Bench) -> list[Any]:
    if bench.flavour == "native":
        torch = bench.module
        return [bench.array(p) for p in torch.nn.Linear(3, 2).parameters()]
    keras = bench.module
    with unidist.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    return [np.asarray(value) for value in model.get_weights()]


@check(13, "init, shutdown, init again: the same seed gives the same initial weights on all ranks, another seed others", flavours="once")
def seeds(bench: Bench) -> None:
    found = {}
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        _again(bench, seed)
        mine = [value.tolist() for value in _fresh_weights(bench)]
        for rank, values in enumerate(bench.everywhere(mine)):
            compare.same(values, mine, f"the weights that rank {rank} drew")
        order = [bench.array(batch).tolist() for batch in unidist.wrap_data(np.arange(16.0), global_batch_size=16, shuffle=True)]
        found[name] = (mine, order)
    compare.same(found["one"], found["again"], "what the same seed gave")
    compare.true(found["one"][0] != found["other"][0], "another seed gives other weights")
    compare.true(found["one"][1] != found["other"][1], "another seed gives another order")
    compare.same(unidist.all_reduce(1, "sum"), bench.size, "a collective after all that")
    _again(bench, 7)


@check(13, "after wrapping, the replicas' random streams differ", flavours="native", needs=(several_processes,))
def streams(bench: Bench) -> None:
    torch = bench.module
    unidist.wrap_model(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)))
    draws = bench.everywhere(bench.array(torch.rand(8)).tolist())
    compare.same(len({tuple(draw) for draw in draws}), bench.size, "different draws")


@check(13, "dropout masks differ between replicas, and repeat with the seed", flavours="native", needs=(several_processes,))
def dropout(bench: Bench) -> None:
    torch, masks = bench.module, []
    for _ in range(2):
        _again(bench, 11)
        model = unidist.wrap_model(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(0.5)))
        masks.append([bench.array(model(torch.ones(64))).tolist() for _ in range(2)])
    compare.same(masks[0], masks[1], "the masks of the same seed")
    compare.true(masks[0][0] != masks[0][1], "the second mask is another")
    compare.same(len({str(mask) for mask in bench.everywhere(masks[0])}), bench.size, "different masks")
    _again(bench, 7)


@check(13, "dropout masks of Keras layers differ between replicas, repeat with the seed, and leave equal states", flavours="keras",
       needs=(several_replicas,))  # fmt: skip
def keras_dropout(bench: Bench) -> None:
    keras, masks = bench.module, []
    for _ in range(2):
        _again(bench, 11)
        with unidist.scope():
            model = unidist.wrap_model(keras.Sequential([keras.Input((64,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)]))
        dropout = model.layers[-1]
        ones = bench.tensor(np.ones((1, 64)))
        if bench.local_replicas == 1:
            mine = [[bench.array(dropout(ones, training=True)) for _ in range(2)]]
        else:
            mine = bench.on_replicas(
                lambda index, dropout=dropout, ones=ones: [dropout(ones, training=True) for _ in range(2)], reduce=False
            )
        masks.append([[bench.array(mask).tolist() for mask in row] for row in mine])
        states = bench.everywhere([bench.array(copy).tolist() for copy in bench.backend._copies(dropout.seed_generator.state.value)])
        compare.same({str(state) for row in states for state in row}, {str(states[0][0])}, "the generators' states")
    compare.same(masks[0], masks[1], "the masks of the same seed")
    compare.true(masks[0][0][0] != masks[0][0][1], "the second mask is another")
    everything = [str(row[0]) for rows in bench.everywhere(masks[0]) for row in rows]
    compare.same(len(set(everything)), bench.replicas, "different masks")
    _again(bench, 7)


@check(13, "loader workers draw different augmentations, over workers, ranks and epochs", flavours="native")
def loader_streams(bench: Bench) -> None:
    torch = bench.module

    class Augmented(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return torch.rand(1, dtype=torch.float64)

    unidist.wrap_model(torch.nn.Linear(1, 1))
    data = unidist.wrap_data(Augmented(), global_batch_size=4, num_workers=2)
    drawn = [value for _ in range(2) for step in seen(bench, data) for value in step]
    everything = [value for row in bench.everywhere(drawn) for value in row]
    compare.same((len(everything), len(set(everything))), (16, 16), "draws, and different ones")
