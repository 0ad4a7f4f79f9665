"""The paper's claims, tested: experiments that resume where they stopped, and their tables in the documentation."""

#: Modules of this package, each with an ``EXPERIMENT``, in the order in which they run.
NAMES: tuple[str, ...] = (
    "linear",
    "meter",
    "branches",
    "batch_warmup",
    "gap",
    "resnet",
    "dlrm",
    "bert",
    "language",
    "ranks",
    "ranks_blind",
)
