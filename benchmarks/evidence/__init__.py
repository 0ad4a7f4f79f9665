"""The paper's claims, tested: experiments that are resumed where they stopped, and the tables of docs/RESULTS.md."""

#: Modules of this package, each with an ``EXPERIMENT``, in the order in which they run.
NAMES: tuple[str, ...] = (
    "linear",
    "meter",
    "gap",
    "resnet",
    "dlrm",
    "bert",
)
