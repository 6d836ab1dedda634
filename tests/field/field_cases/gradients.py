"""Cases 1 to 12: how gradients are averaged and scaled."""

from __future__ import annotations

import unidist
from field_cases.toys import numbers, w1, weight_of
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check


@check(
    1,
    "one step of the toy, in whole and uneven batches",
    number=1,
    cases={"four": ((1, 2, 3, 4), 1.15), "three": ((1, 2, 3), 1.093333333333)},
)
def toy(bench: Bench, case: tuple[tuple[float, ...], float]) -> None:
    values, expected = case
    model, optimizer = w1(bench)
    step = unidist.make_train_step(model, optimizer, bench.loss("linear"))
    for batch in unidist.wrap_data(numbers(*values), global_batch_size=len(values)):
        step(batch)
    bench.close(weight_of(bench, model), expected, "the weight", tolerance=1e-6)
    compare.true(step.updates == 1, "there was one update")
