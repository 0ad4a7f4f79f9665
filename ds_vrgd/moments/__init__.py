"""Chunk gradients to mean and centred sum of squares, on the elements that this rank updates."""

from ds_vrgd.moments.chan import Moments
from ds_vrgd.moments.copies import CopiedMoments, WithCopies
from ds_vrgd.moments.layout import SUM_DTYPE, Layer, LayerTable, Ranks, Segment, ShardLayout
from ds_vrgd.moments.nodes import NodeGroups
from ds_vrgd.moments.norms import ChunkNorms
from ds_vrgd.moments.replicated import ReplicatedMoments
from ds_vrgd.moments.route import Route
from ds_vrgd.moments.separate import SeparateMoments
from ds_vrgd.moments.sequences import SequenceGroups
from ds_vrgd.moments.sharded import ShardedMoments

__all__ = [
    "SUM_DTYPE",
    "ChunkNorms",
    "CopiedMoments",
    "Layer",
    "LayerTable",
    "Moments",
    "NodeGroups",
    "Ranks",
    "ReplicatedMoments",
    "Route",
    "Segment",
    "SeparateMoments",
    "SequenceGroups",
    "ShardLayout",
    "ShardedMoments",
    "WithCopies",
]
