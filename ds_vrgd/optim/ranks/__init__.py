"""A report on the ranks of every step, and a watch that names the one that differs."""

from ds_vrgd.optim.ranks.recorder import RankError, RankRecorder
from ds_vrgd.optim.ranks.report import RankReport
from ds_vrgd.optim.ranks.watch import RankEvent, RankWatch
