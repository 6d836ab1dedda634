"""What a backend author writes: the abstract Backend, its Step, and the facts both are given."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from unidist.batch import Share, ShareLog, Window
from unidist.errors import UnsupportedError

if TYPE_CHECKING:
    from unidist.checkpoint.parts import Store
    from unidist.control import Control
    from unidist.data import Source
    from unidist.groups import Group
    from unidist.world import World


@dataclass(frozen=True)
class Settings:
    """What `init` was told, apart from the names of backend and framework."""

    timeout: float = 600.0
    check: bool = True
    seed: int | None = None
    num_devices: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOptions:
    """What `make_train_step` was told."""

    loss: Any
    compute_loss: Callable[..., Any] | None = None
    accumulation: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    precision: str | None = None
    scheduler: Any = None
    scaler: Any = None
    check_every: int = 0


class Backend(ABC):
    """One engine of one framework: the public functions check their arguments and call these methods.

    Class attributes: `framework` and `name` as in the registry; `abilities`, the only thing that other code may ask
    of a backend; `refuses`, contract points that it refuses, each with the reason it gives in its UnsupportedError.
    Abilities: "processes" (may run in several processes), "replicas" (one process may hold several replicas), "groups" (some ranks may do a
    collective among themselves), "relayed" (tensors travel over the control plane), "backward" (torch: gradients are exchanged when
    backward returns), "reduce_gradients" (tensorflow: by that verb or in apply).
    """

    framework: ClassVar[str]
    name: ClassVar[str]
    abilities: ClassVar[frozenset[str]] = frozenset()
    refuses: ClassVar[Mapping[int, str]] = {}

    def __init__(self, world: World, control: Control, settings: Settings) -> None:
        self.world = world
        self.control = control
        self.settings = settings
        self.shares = ShareLog()
        self.groups: dict[Group, Any] = {}  # what `_new_group` returned

    # life

    @classmethod
    def _adopted(cls) -> World | None:
        """The world of an engine that the user has already initialised; None when there is none."""
        return None

    @classmethod
    def _meet(cls, address: str | None) -> str:
        """With an adopted engine: rank 0's `address` on all ranks."""
        raise NotImplementedError

    @abstractmethod
    def _start(self) -> None:
        """Bring the engine up; every rank calls it at the same time."""

    def _seed(self, seed: int) -> None:  # noqa: B027  a framework's base does it
        """Set the random generators of which initial weights are drawn, alike on all ranks."""

    @abstractmethod
    def _stop(self) -> None:
        """Take down what `_start` brought up, nothing that was adopted."""

    # facts

    @property
    def num_replicas(self) -> int:
        """Replicas in the job."""
        return self.world.size * self.local_replicas

    @property
    def local_replicas(self) -> int:
        """Replicas that this process holds."""
        return 1

    @property
    @abstractmethod
    def device(self) -> Any:
        """The framework's device of this process (its first one)."""

    @abstractmethod
    def _hardware(self) -> str:
        """What the job runs on, for the line at the start: "4 x RTX A6000, nccl"."""

    def _engine(self) -> Mapping[str, Any]:
        """The engine's own objects by the name users find them under: process_group, strategy, device_mesh."""
        return {}

    # objects

    def _scope(self) -> contextlib.AbstractContextManager[Any]:
        """Where models are to be built."""
        return contextlib.nullcontext()

    @abstractmethod
    def _wrap_model(self, model: Any, *, sync_batchnorm: bool, find_unused_parameters: bool, options: Mapping[str, Any]) -> Any:
        """Make the model ready, in place; all ranks then hold rank 0's weights and buffers."""

    @abstractmethod
    def _wrap_optimizer(self, optimizer: Any, model: Any, *, compression: Any, options: Mapping[str, Any]) -> Any:
        """Make the optimizer ready, in place; all ranks then hold rank 0's state and hyper-parameters."""

    def _native(self, obj: Any) -> Any:
        """The engine's object under a wrapped one; the object itself when there is none."""
        return obj

    @abstractmethod
    def _replicated(self, obj: Any) -> dict[str, Any]:
        """Name to tensor of everything in a model or optimizer that must be equal on all ranks."""

    def _copies(self, tensor: Any) -> Sequence[Any]:
        """What this process's replicas hold of a tensor of `_replicated`, one of each."""
        return [tensor]

    @abstractmethod
    def _has_state(self, obj: Any) -> bool:
        """Whether `broadcast` sets this object in place (models, optimizers, schedulers, scalers)."""

    @abstractmethod
    def _same_start(self, obj: Any, root: int) -> None:
        """Set everything of `_replicated` to rank `root`'s, hyper-parameters included; names, shapes, dtypes are compared first."""

    # exchange

    def _backward(self, loss: Any, *, scale: float | None, weight: Any) -> None:
        """Gradients of `scale * loss`, or with (total, weight) of the sum of totals over the sum of weights, reduced."""
        raise UnsupportedError(f"{self.framework}/{self.name} has no backward")

    def _seen_scale(self) -> Any:
        """How the batch last drawn counts in plain calls: a number; on TensorFlow a tensor inside a traced function."""
        return self.shares.seen().scale

    def _average(self, gradients: Sequence[Any], *, scale: float | None, weight: Any) -> list[Any]:
        """The reduced gradients; local ones count by `scale`, or by the local `weight` over the sum of weights."""
        raise UnsupportedError(f"{self.framework}/{self.name} has no reduce_gradients")

    @abstractmethod
    def _clip(self, optimizer: Any, *, max_norm: float | None, max_value: float | None) -> Any:
        """Clip the reduced gradients that the optimizer is about to apply; returns the global norm before."""

    # steps

    @abstractmethod
    def _train_step(self, model: Any, optimizer: Any, options: StepOptions) -> Step:
        """The step of `make_train_step`."""

    @abstractmethod
    def _evaluate_batch(
        self, model: Any, batch: Any, share: Share | None, loss: Any, metrics: Mapping[str, Any]
    ) -> dict[str, tuple[float, float]]:
        """(total, weight) of the loss and of each metric over this process's share, without gradients."""

    @abstractmethod
    def _is_metric(self, metric: Any) -> bool:
        """Whether this is a metric object of the framework, with state, rather than a function."""

    @abstractmethod
    def _merge_metric(self, metric: Any) -> float:
        """The value of a framework's metric object from the merged state of all ranks."""

    @abstractmethod
    def _predict_batch(self, model: Any, batch: Any, share: Share | None) -> Any:
        """The outputs for this process's share, without the borrowed ones, as a nest of tensors."""

    # data

    @abstractmethod
    def _source(self, data: Any, *, shuffle: bool, options: Mapping[str, Any]) -> Source:
        """What `wrap_data` was given, understood: its length, and how to build the framework's loader for a plan of shares."""

    def _end_of_pass(self) -> None:  # noqa: B027  # most backends have nothing to do
        """After a pass over `wrap_data`, on all ranks: rank 0's running statistics reach the others."""

    def _fit_data(self, data: Any) -> Any:
        """For Keras' own fit: this process's shares of a data set of the framework or of `wrap_data`'s; None for other data."""
        return None

    # collectives: contiguous tensors on which all ranks agree. They get a keyword `group` when only its ranks take part

    def _new_group(self, group: Group) -> Any:
        """The engine's own of a group, kept in `groups`; every rank of the job calls it, in one order. `_stop` ends it."""
        raise UnsupportedError(f"{self.framework}/{self.name} has no groups of ranks: leave group out, so that all ranks take part")

    @abstractmethod
    def _as_tensor(self, leaf: Any) -> Any:
        """A detached, contiguous tensor of a number, array or tensor; the same dtype."""

    @abstractmethod
    def _as_rows(self, tensor: Any) -> Any:
        """The tensor itself; one row (1,) for a 0-d tensor."""

    @abstractmethod
    def _as_leaf(self, tensor: Any, like: Any) -> Any:
        """Back to the type and device of `like` (a number or array or tensor); never shares memory with it."""

    @abstractmethod
    def _signature(self, tensor: Any) -> tuple[tuple[int, ...], str]:
        """Shape and dtype name."""

    @abstractmethod
    def _all_reduce(self, tensor: Any, op: str, *, group: Group | None = None) -> Any:
        """Over all ranks; op is "sum", "mean", "max", "min" or "product"."""

    @abstractmethod
    def _all_gather(self, tensor: Any, first_dims: Sequence[int], *, group: Group | None = None) -> Any:
        """The ranks' tensors joined along the first axis; `first_dims` holds every rank's first dimension."""

    @abstractmethod
    def _broadcast(self, tensor: Any, root: int, *, group: Group | None = None) -> Any:
        """Rank `root`'s tensor; `root` is a rank of the job."""

    def _reduce_scatter(self, tensor: Any, op: str, sizes: Sequence[int], *, group: Group | None = None) -> Any:
        """This rank's rows of what `_all_reduce` gives; `sizes` holds every rank's number of rows."""
        whole = self._all_reduce(tensor, op, **({} if group is None else {"group": group}))
        place = self.world.rank if group is None else group.ranks.index(self.world.rank)
        return whole[sum(sizes[:place]) : sum(sizes[: place + 1])]

    def _all_to_all(self, tensor: Any, table: Sequence[Sequence[int]], *, group: Group | None = None) -> Any:
        """The rows that all ranks have for this one, in rank order; `table[a][b]` rows go from the a-th rank to the b-th."""
        first_dims = [sum(row) for row in table]
        joined = self._all_gather(tensor, first_dims, **({} if group is None else {"group": group}))
        place = self.world.rank if group is None else group.ranks.index(self.world.rank)
        begins = [sum(first_dims[:rank]) + sum(row[:place]) for rank, row in enumerate(table)]
        return self._join([joined[begin : begin + row[place]] for begin, row in zip(begins, table)])

    def _join(self, tensors: Sequence[Any]) -> Any:
        """Tensors joined along the first axis; asked for only by `_all_to_all` as it stands here."""
        raise UnsupportedError(f"{self.framework}/{self.name} has no all_to_all")

    @abstractmethod
    def _grad_collective(self, name: str, tensor: Any, **arguments: Any) -> Any:
        """`_all_reduce` (`op`), `_all_gather`, `_reduce_scatter` (`op`), `_all_to_all` (`sizes`) with one device's gradients.

        It compares shapes and dtypes itself; each gets `group` when only some ranks take part. Raises UnsupportedError for those
        that the engine has no gradient for.
        """

    # state

    @abstractmethod
    def _weights(self, model: Any) -> dict[str, Any]:
        """Name to NumPy array of the model's weights and buffers, whole."""

    @abstractmethod
    def _set_weights(self, model: Any, weights: Mapping[str, Any]) -> None:
        """The other way round; every name, shape must be there."""

    def _store(self) -> Store:
        """How the framework's objects go into checkpoints and come back."""
        raise UnsupportedError(f"{self.framework}/{self.name} has no save and load")


class Step(ABC):
    """A training step: the neutral part counts shares, windows and losses, `_run` computes.

    Calling it with a batch returns the mean loss of this process's share: a native 0-d tensor, detached, not waited for.
    """

    def __init__(self, backend: Backend, model: Any, options: StepOptions) -> None:
        self.updates = 0
        self.last_norm: Any = None
        self._backend = backend
        self._model = model
        self._options = options
        self._skipped = False  # whether the last update was, because its gradients were not finite
        self._window = Window(options.accumulation, backend.world.size)
        self._losses: list[tuple[Any, Any]] = []
        self._sums = [0.0, 0.0]
        self._skipped = False  # the window ended without an update: a scaler found gradients that are not finite

    def __call__(self, batch: Any) -> Any:
        """One batch: forward, backward, and at the end of a window the exchange and the update."""
        share = self._backend.shares.take()
        window = self._window
        factor = window.add(share)
        loss, weight = self._run(batch, share, factor)
        losses = self._losses
        losses.append((loss, weight))
        if len(losses) >= 256:
            self._fold()
        if window.complete and not self._skipped:
            self.updates += 1
            if self._options.scheduler is not None:
                self._options.scheduler.step()
            if self._options.check_every and self.updates % self._options.check_every == 0:
                self._check_replicas()
        return loss

    def _check_replicas(self) -> None:
        """Running statistics are rank 0's from here on, as in every call that all ranks make."""
        from unidist.objects import assert_replicas_equal

        self._backend._end_of_pass()
        assert_replicas_equal(self._model)

    @abstractmethod
    def _run(self, batch: Any, share: Share | None, factor: float) -> tuple[Any, Any]:
        """(mean loss, its weight) of the local share; exchanges and updates when `self._window.complete`."""

    @abstractmethod
    def _to_floats(self, pairs: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        """The numbers of (loss, weight) pairs; waits for the device."""

    def _fold(self) -> None:
        for loss, weight in self._to_floats(self._losses):
            if weight:
                self._sums[0] += loss * weight
                self._sums[1] += weight
        self._losses.clear()

    def mean_loss(self) -> float:
        """The exact mean loss over all samples of all ranks since the last call; every rank must call it.

        Returns NaN when there was no sample. Raises CollectiveTimeoutError.
        """
        from unidist.metrics import sum_over_ranks

        self._fold()
        total, weight = sum_over_ranks(self._backend.control, "mean_loss", self._sums)
        self._sums = [0.0, 0.0]
        return total / weight if weight else float("nan")


def each_step(pairs: Iterator[tuple[Share, Any]], backend: Backend) -> Iterator[Any]:
    """The batches of a feed, each share noted as its batch is handed out, and the end of the pass told to the backend."""
    for share, batch in pairs:
        backend.shares.draw(share)
        yield batch
    backend.shares.clear()
    backend._end_of_pass()
