"""Chunk gradients to mean and centred sum of squares, on the elements that this rank updates."""

from ds_vrgd.moments.backward import BackwardPasses
from ds_vrgd.moments.buckets import Route
from ds_vrgd.moments.chan import Moments
from ds_vrgd.moments.compare import Comparison
from ds_vrgd.moments.compose import CombinedMoments, CopiedMoments
from ds_vrgd.moments.discards import Discards, zeros_among
from ds_vrgd.moments.exchange import Exchange
from ds_vrgd.moments.groups import NodeGroups, SequenceGroups, gathered
from ds_vrgd.moments.hooks import GradientHook, value_of, weakly
from ds_vrgd.moments.layout import (
    SUM_DTYPE,
    Layer,
    LayerTable,
    Ranks,
    Segment,
    ShardLayout,
    is_dtensor,
    local,
    local_gradient,
)
from ds_vrgd.moments.norms import ChunkNorms
from ds_vrgd.moments.replicated import ReplicatedMoments
from ds_vrgd.moments.sharded import ShardedMoments
