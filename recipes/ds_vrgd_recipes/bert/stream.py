"""The order of training data: the example of sample j of update s, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.utils.data import DataLoader, Dataset, Sampler

from ds_vrgd_recipes.bert.examples import IGNORED_LABEL, Batch, ExampleBuilder, epoch_order
from ds_vrgd_recipes.bert.packing import pack
from ds_vrgd_recipes.bert.runfile import Phase
from ds_vrgd_recipes.run.preemption import heed_only_the_rank
from ds_vrgd_recipes.run.ranks import share

# First entries of a generator's seed keep its purposes apart.
_ORDER, _EXAMPLE, _EVALUATION = 0, 1, 2


@dataclass(frozen=True)
class MicroBatches(Dataset[Batch]):
    """Packed micro-batches of one phase, by (update, number of the micro-batch within the global batch)."""

    builder: ExampleBuilder
    seed: int
    phase_index: int
    phase: Phase

    def __getitem__(self, place: tuple[int, int]) -> Batch:
        return pack(self.examples(place))

    def examples(self, place: tuple[int, int]) -> Batch:
        """Return the micro-batch with padding, as ``ExampleBuilder.batch`` makes it."""
        step, micro_batch = place
        first = micro_batch * self.phase.micro_batch
        samples = range(first, first + self.phase.micro_batch)
        chunks = [self._chunk(step * self.phase.global_batch + sample) for sample in samples]
        keys = [(_EXAMPLE, self.seed, self.phase_index, step, sample) for sample in samples]
        return self.builder.batch(chunks, keys)

    def _chunk(self, position: int) -> int:
        """Return the chunk at a position of the phase's endless walk, with a new random order for every pass."""
        epoch, place = divmod(position, len(self.builder.chunks))
        key = (_ORDER, self.seed, self.phase_index, epoch)
        return int(epoch_order(len(self.builder.chunks), key)[place])


@dataclass(frozen=True)
class RankOrder(Sampler[tuple[int, int]]):
    """Places of one rank's micro-batches, update by update from ``first_step`` to the phase's end.

    The micro-batches of a global batch go round the ranks. Each rank has ``accumulation`` of them in every update, so
    no rank runs out before another.
    """

    phase: Phase
    first_step: int
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for step in range(self.first_step, self.phase.steps):
            for turn in range(self.phase.accumulation_steps(self.ranks)):
                yield step, turn * self.ranks + self.rank

    def __len__(self) -> int:
        return (self.phase.steps - self.first_step) * self.phase.accumulation_steps(self.ranks)


def training_batches(
    micro_batches: MicroBatches, order: RankOrder, workers: int, *, pinned: bool = False
) -> Iterator[Batch]:
    """Yield one rank's micro-batches in order, built ahead of time by ``workers`` processes.

    Args:
        pinned: in memory from which a GPU copies by itself. Otherwise host and GPU wait for each other once per
            micro-batch.
    """
    # Forked workers share the mapped corpus; any other start method would copy it.
    context = "fork" if workers else None
    loader = DataLoader(
        micro_batches,
        batch_size=None,
        sampler=order,
        num_workers=workers,
        multiprocessing_context=context,
        worker_init_fn=heed_only_the_rank,
        pin_memory=pinned,
    )
    return iter(loader)


def evaluation_batches(
    builder: ExampleBuilder, sequences: int, micro_batch: int, rank: int, ranks: int
) -> Iterator[Batch]:
    """Yield one rank's share of at most ``sequences`` held-out examples, with the same masks in every run.

    Rows that fill up a batch have no label; see ``ranks.share``.
    """
    order = epoch_order(len(builder.chunks), (_EVALUATION,))[:sequences].tolist()
    for places, real in share(len(order), micro_batch, rank, ranks):
        rows = [order[place] for place in places]
        batch = builder.batch(rows, [(_EVALUATION, chunk) for chunk in rows])
        batch["labels"][real:] = IGNORED_LABEL
        yield pack(batch)
