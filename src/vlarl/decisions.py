"""What a policy reads and samples, as batches with one row for each decision.

A decision is anything that a policy samples at one observation: the action tokens of a chunk, the tokens of a text, the
steps of a denoising chain. It has L elements, each with a log-prob. Nothing outside `policies/` knows more about it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TensorRows:
    """A batch: every field is a tensor with one row for each member, a batch of as many rows, or None.

    A class whose tensors are laid out otherwise, such as rows of different lengths end to end, has its own `__len__`
    and `rows`; `cat` joins the first dimension of every tensor.

    >>> @dataclass(frozen=True)
    ... class Prompts(TensorRows):
    ...     ids: torch.Tensor  # [B, L]
    >>> short, long = Prompts(torch.tensor([[1, 2]])), Prompts(torch.tensor([[3, 4, 5]]))
    >>> Prompts.cat([short, long]).ids.tolist()
    [[1, 2, 0], [3, 4, 5]]
    """

    def __len__(self) -> int:
        return next(len(column) for column in self._columns().values() if column is not None)

    def map(self, change: Change) -> Self:
        """The same batch with every tensor changed."""
        return self._changed(change, lambda part: part.map(change))

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in the order of the fields."""
        found: list[torch.Tensor] = []
        for value in self._columns().values():
            if isinstance(value, TensorRows):
                found += value.tensors()
            elif value is not None:
                found.append(value)
        return found

    def rows(self, index: torch.Tensor | slice) -> Self:
        """The chosen rows; those of a slice are not copied."""
        if isinstance(index, slice):
            return self._changed(lambda column: column[index], lambda part: part.rows(index))
        return self._changed(lambda column: column.index_select(0, index), lambda part: part.rows(index))

    def empty(self) -> Self:
        """The same kind of batch without any row."""
        return self.rows(slice(0, 0)).map(torch.clone)

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device. A copy of pinned memory to a GPU runs while the host continues."""
        waits = torch.device(device).type == "cpu"  # a copy from a GPU in the background would be read too early
        return self._changed(lambda column: column.to(device, non_blocking=not waits), lambda part: part.to(device))

    def pinned(self) -> Self:
        """The same batch in page-locked memory of the host, which a GPU reads by itself."""
        return self.map(torch.Tensor.pin_memory)

    def joined(self) -> TensorRows:
        """The rows as one batch in memory, which they are already unless a class says otherwise."""
        return self

    def carried(self, index: int) -> tuple[TensorRows, int]:
        """What travels to another process for one of the rows: a batch, and the row's index in it."""
        return self.rows(slice(index, index + 1)), 0

    def prefetch(self, index: torch.Tensor) -> None:
        """Say which rows are read next: those that are elsewhere begin to arrive."""

    def gone(self, missed: str) -> bool:
        """Whether the rows can't be read any more, after an object of the name `missed` could not be fetched."""
        return False

    @classmethod
    def rows_of(cls, picked: Sequence[tuple[Self, torch.Tensor]]) -> list[TensorRows]:
        """The rows with these indices of each of several batches of one class."""
        return [batch.rows(index) for batch, index in picked]

    def rounded_up(self) -> Self:
        """The same rows in a shape that few batches differ in, for passes that are recorded once for each shape."""
        return self

    @property
    def shape_key(self) -> tuple[int, ...]:
        """What a recorded pass depends on: the sizes of all tensors."""
        columns = [column for column in self._columns().values() if column is not None]
        return tuple(n for c in columns for n in (c.shape_key if isinstance(c, TensorRows) else c.shape))

    @property
    def lengths(self) -> torch.Tensor | None:
        """[B] how long each row is, to put rows of like length together; None where all rows are alike."""
        return None

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in their order; shorter rows are padded with zeros on the right."""
        first = parts[0]
        joined: dict[str, torch.Tensor | TensorRows] = {}
        for name, value in first._columns().items():
            columns = [getattr(part, name) for part in parts]
            if len({column is None for column in columns}) > 1:
                raise ValueError(f"{name} is there in some parts and missing in others")
            if isinstance(value, TensorRows):
                joined[name] = type(value).cat(columns)
            elif value is not None:
                joined[name] = _cat_padded(columns)
        return replace(first, **joined)

    def __getstate__(self) -> dict[str, object]:
        """Tensors travel to other processes as arrays, which Ray's object store holds for all of them at once."""
        return {
            field.name: value.cpu().contiguous().numpy() if isinstance(value, torch.Tensor) else value
            for field, value in ((field, getattr(self, field.name)) for field in fields(self))
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        """The same batch; what comes from an object store is read-only."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            for name, value in state.items():
                object.__setattr__(self, name, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)

    def _changed(self, change: Change, change_part: Callable[[TensorRows], TensorRows]) -> Self:
        """The same batch with every tensor changed, and every batch in it by a method of its own."""
        changed = {
            name: change_part(value) if isinstance(value, TensorRows) else change(value)
            for name, value in self._columns().items()
            if value is not None
        }
        return replace(self, **changed)

    def _columns(self) -> dict[str, torch.Tensor | TensorRows | None]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: v for n, v in values.items() if v is None or isinstance(v, torch.Tensor | TensorRows)}


Batch = TypeVar("Batch", bound=TensorRows)


@dataclass(frozen=True, slots=True)
class Row(Generic[Batch]):
    """One row of a batch, which stays in memory as long as one of its rows is used. Pickled, it is the row alone, or
    the name of a batch that is stored elsewhere."""

    batch: Batch
    index: int

    def alone(self) -> Batch:
        """The row as a batch of one."""
        return self.batch.rows(slice(self.index, self.index + 1))

    def __reduce__(self) -> tuple[Any, ...]:
        return Row, self.batch.carried(self.index)


@dataclass(frozen=True)
class PickedRows(TensorRows):
    """Rows of several batches, which are joined where they are read: a microbatch takes memory, and not a whole update.

    `to` and `map` return the rows themselves. Pickled, batches of which no row is picked are left out.
    """

    batches: tuple[TensorRows, ...]
    batch: torch.Tensor  # [N] int64 index of each row's batch
    index: torch.Tensor  # [N] int64 of each row in its batch
    row_lengths: torch.Tensor | None  # [N] as `lengths`

    @classmethod
    def of(cls, rows: Sequence[Row[Any]]) -> Self:
        """These rows, in their order."""
        batches = list({id(row.batch): row.batch for row in rows}.values())
        order = {id(batch): position for position, batch in enumerate(batches)}
        batch = torch.tensor([order[id(row.batch)] for row in rows], dtype=torch.int64)
        index = torch.tensor([row.index for row in rows], dtype=torch.int64)
        known = [None if (lengths := each.lengths) is None else lengths.tolist() for each in batches]
        found = [own[i] for which, i in zip(batch, index, strict=True) if (own := known[which]) is not None]
        return cls(tuple(batches), batch, index, torch.tensor(found) if found else None)

    def joined(self) -> TensorRows:
        """The rows as one batch."""
        order = torch.argsort(self.batch, stable=True)  # the rows of a batch follow each other
        counts = torch.bincount(self.batch, minlength=len(self.batches)).tolist()
        indices = enumerate(torch.split(self.index[order], counts))
        parts = self.parts([(which, index) for which, index in indices if len(index)])
        joined = type(parts[0]).cat(parts)
        return joined if torch.equal(order, torch.arange(len(order))) else joined.rows(torch.argsort(order))

    def parts(self, picked: Sequence[tuple[int, torch.Tensor]]) -> list[TensorRows]:
        """The rows with these indices of some of the batches, each named by its own index."""
        chosen = [(self.batches[which], index) for which, index in picked]
        return type(chosen[0][0]).rows_of(chosen)

    def map(self, change: Change) -> TensorRows:  # type: ignore[override]
        """The rows as one batch with every tensor changed."""
        return self.joined().map(change)

    def to(self, device: torch.device | str) -> TensorRows:  # type: ignore[override]
        """The rows as one batch on a device."""
        return self.joined().to(device)

    def prefetch(self, index: torch.Tensor) -> None:
        """Say which rows are read next, to their batches."""
        which = self.batch[index]
        for batch in set(which.tolist()):
            self.batches[batch].prefetch(self.index[index[which == batch]])

    def empty(self) -> Self:
        """No rows."""
        return replace(self.rows(slice(0, 0)), batches=())

    def __getstate__(self) -> dict[str, object]:
        """Only the batches that a row is picked of."""
        used, batch = np.unique(self.batch.numpy(), return_inverse=True)
        state = super().__getstate__()
        return state | {"batches": tuple(self.batches[i] for i in used.tolist()), "batch": batch}

    @property
    def lengths(self) -> torch.Tensor | None:
        """[N] how long each row is; None where all rows are alike."""
        return self.row_lengths


def _cat_padded(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = [max(sizes) for sizes in zip(*(column.shape[1:] for column in columns), strict=True)]
    padded = []
    for column in columns:
        missing = [wanted - size for wanted, size in zip(sizes, column.shape[1:], strict=True)]
        padding = [side for amount in reversed(missing) for side in (0, amount)]
        padded.append(F.pad(column, padding) if any(missing) else column)
    return torch.cat(padded)


@dataclass(frozen=True)
class Decisions(TensorRows):
    """A padded batch of what was sampled.

    For one chunk of two actions with three dimensions: `engine_logprobs` [1, 6], `mask` all True, `step` 0 0 0 1 1 1.
    """

    sample: TensorRows  # private to the policy; that of a text has `ids` [B, L], its tokens, and `stopped` [B] bool
    engine_logprobs: torch.Tensor  # [B, L] float32, of the weights that sampled, at the sampling temperature
    mask: torch.Tensor  # [B, L] bool: the elements that count; padding does not, nor what was not executed
    step: torch.Tensor  # [B, L] int64 which environment step of the decision an element belongs to
    version: torch.Tensor  # [B] int64 of the weights that sampled

    def token_ids(self) -> list[list[int]]:
        """The tokens of each text, the stop token included and padding left out; no tokens for any other decision."""
        ids = getattr(self.sample, "ids", None)
        if ids is None:
            return [[] for _ in range(len(self))]
        return [row[mask].tolist() for row, mask in zip(ids, self.mask, strict=True)]

    def cut_off(self) -> list[bool]:
        """Whether each text reached its limit of tokens before a stop token; False for any other decision."""
        stopped = getattr(self.sample, "stopped", None)
        return [False] * len(self) if stopped is None else [not ended for ended in stopped.tolist()]

    def of_version(self, version: int) -> Decisions:
        """The same decisions, made by weights of this version."""
        return replace(self, version=torch.full_like(self.version, version))

    def executed(self, num_executed: torch.Tensor) -> Decisions:
        """The same decisions, of which the first `num_executed` [B] environment steps count."""
        return replace(self, mask=self.mask & (self.step < num_executed[:, None]))


@dataclass(frozen=True)
class Sampling:
    """How decisions are sampled. A policy says which of these it takes (`Policy.sampling_options`)."""

    temperature: float = 1.0  # 0 takes the likeliest element
    top_p: float = 1.0  # elements of the smallest set with at least this probability; 1 takes all
    top_k: int = 0  # the likeliest elements; 0 takes all
    max_tokens: int | None = None  # of a text
    min_tokens: int = 0  # of a text, before a stop token can be sampled
    stop: tuple[int, ...] = ()  # tokens that end a text, besides the model's own
    stop_strings: tuple[str, ...] = ()  # texts that end a text

    def chosen(self) -> frozenset[str]:
        """The options that are not left at their defaults."""
        default = Sampling()
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name))


@dataclass(frozen=True)
class TrainBatch(TensorRows):
    """Decisions ready for the learner, one row each; rows of one trajectory stay in order.

    What is None at first is filled in on the way: by `Learner.annotate`, from the algorithm's estimates, and for each
    minibatch.
    """

    inputs: TensorRows
    decisions: Decisions  # of which executed steps count
    trajectory: torch.Tensor  # [N] int64 which trajectory of the batch a row belongs to
    learner_logprobs: torch.Tensor | None = None  # [N, L] of the policy before its first step; None: no pass was needed
    entropy: torch.Tensor | None = None  # [N, L] of the policy before its first step; None as above
    ref_logprobs: torch.Tensor | None = None  # [N, L] of the reference policy; None without one
    old_values: torch.Tensor | None = None  # [N, V] values before the first step; None without a critic
    advantages: torch.Tensor | None = None  # [N, L]
    returns: torch.Tensor | None = None  # [N, V] value targets; None without a critic
    value_mask: torch.Tensor | None = None  # [N, V] bool: values of executed steps; None without a critic
    old_logprobs: torch.Tensor | None = None  # [N, L] where the ratio is 1; None: at the log-probs of the pass itself
    weights: torch.Tensor | None = None  # [N, L] what each element counts in its minibatch
    sequence_log_ratio: torch.Tensor | None = None  # [N] mean over the row's trajectory; None unless it is needed
    selected: torch.Tensor | None = None  # [N, L] bool: elements that the policy gradient is taken of; None for all

    @property
    def mask(self) -> torch.Tensor:
        """[N, L] bool: elements of executed steps."""
        return self.decisions.mask
