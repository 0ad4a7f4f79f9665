"""The optimizers, on shards, segments and moments. No engine is imported here: adapters implement :class:`Observer`."""

from ds_vrgd.optim.adam import VRAdam, VRAdamW
from ds_vrgd.optim.lamb import LAMB, VRLAMB
from ds_vrgd.optim.lars import LARS, VRLARS
from ds_vrgd.optim.observer import LayerStatistics, Observer
from ds_vrgd.optim.optimizer import VROptimizer, allocate_state_only, find_optimizer, unused_over
from ds_vrgd.optim.ranks.recorder import RankError
from ds_vrgd.optim.ranks.report import RankReport
from ds_vrgd.optim.ranks.watch import RankEvent, RankWatch
from ds_vrgd.optim.sgd import VRSGD, VRMomentum

#: Every optimizer, by the name that a DeepSpeed JSON uses.
OPTIMIZERS: dict[str, type[VROptimizer]] = {
    cls.__name__: cls for cls in (VRSGD, VRMomentum, VRAdam, VRAdamW, VRLARS, VRLAMB, LARS, LAMB)
}
